"""The Lua scripts. Every change of the store is one script, and Redis runs one at a time, wholly or not at all.

The invariant: a script touches only the keys that it is given, reads the time from Redis, and checks before it writes. When the
same call comes again because the reply was lost, it repeats its reply. When a call comes over a connection that its client has
replaced, it does nothing. So a call may be repeated until it is answered, and takes effect once. Python computes beforehand
what a reply needs (digests of transitions, compressed tokens). Where that depends on stored data, the script compares and
refuses, and the caller reads again.

The first comments of a script name its keys and arguments, which become local variables. `MORE` and `REST` are the numbers of
keys and arguments before those without names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

_LUA: Final = resources.files(__package__) / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """A script as Redis gets it; `sha` is its name in Redis once Redis has seen it."""

    name: str
    text: str
    sha: bytes


@cache
def of_store(name: str) -> Script:
    """Return the store's own script of that name."""
    return script(name, _LUA.joinpath(f"{name}.lua").read_text("utf-8"))


def script(name: str, body: str) -> Script:
    """Make a script from its text, which names keys and arguments; operations of plugins use it, too."""
    common = _LUA.joinpath("common.lua").read_text("utf-8")
    keys = ["answers", *_named(body, "keys")]
    arguments = ["connection", "batch", "call", *_named(body, "arguments")]
    head = [f"local {key} = KEYS[{i}]" for i, key in enumerate(keys, 1)]
    head += [f"local {argument} = ARGV[{i}]" for i, argument in enumerate(arguments, 1)]
    head.append(f"local MORE, REST = {len(keys)}, {len(arguments)}")
    text = "\n".join((*head, common, body))
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest().encode()
    return Script(name, text, sha)


def _named(body: str, what: str) -> Sequence[str]:
    lines = (line for line in body.splitlines() if line.startswith(f"-- {what}:"))
    return next(lines, "").partition(":")[2].split()
