"""The Lua scripts: every change of the store is one of them, and Redis runs one at a time, wholly or not at all.

The invariant: a script touches only the keys it is given, reads the time from Redis, checks before it writes, says again what
it said before when the same call comes a second time because the reply was lost, and does nothing when it comes over a
connection that its client has replaced. So a call may be repeated until it is answered, and takes effect once. What a reply
needs in Python (digests of transitions, compressed tokens) is computed before; where it depends on what is stored, the script
compares and refuses, and the caller looks again.

The first comments of a script name its keys and arguments; they become local variables of these names. `MORE` and `REST` are
how many keys and arguments came before those that are not named.
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
    """A script as Redis gets it; `sha` is the name by which Redis knows it once it has seen it."""

    name: str
    text: str
    sha: bytes


@cache
def of_store(name: str) -> Script:
    """The store's own script of that name."""
    return script(name, _LUA.joinpath(f"{name}.lua").read_text("utf-8"))


def script(name: str, body: str) -> Script:
    """A script, for operations of a plugin too, from the text that names its keys and arguments."""
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
