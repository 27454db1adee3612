"""Why attempts failed, in a line: the exception, and the place in the user's own code; alike ones together.

The invariant: the same words in a dry run, in training's warnings and in `lightning runs`, read from the error that was stored.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import lightning
from lightning.runner.policy_faults import CAUSES, read_cause

FRAME: Final = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$')
GROUP: Final = re.compile(r"^(?: +\+ (?=Exception Group)|(?: *\| ?)+)")
"""Before the lines of a group of exceptions."""
LIBRARIES: Final = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(lightning.__file__).parent),
    }
)
"""Folders of code that is not the user's; `site-packages` of other machines as well."""
LONGEST: Final = 300
"""Characters of a reason."""


def reason(error: str) -> str:
    """The error in a line: `KeyError: 'answer' at my_agent.py:12 in solve`.

    Of a traceback it is the last exception and the innermost frame in the user's code; of any other text the first line.
    """
    lines = [GROUP.sub("", line) for line in error.strip().splitlines()]
    frames = [(number, found) for number, line in enumerate(lines) if (found := FRAME.match(line))]
    if not frames:
        return with_cure(_cut(lines[0])) if lines else "no reason was given"
    said = next(
        (line for line in lines[frames[-1][0] + 1 :] if line[:1].strip() and not set(line) <= set("~^ |+-")), ""
    )
    own = [found for _, found in frames if is_own(found["file"])]
    place = f" at {Path(own[-1]['file']).name}:{own[-1]['line']} in {own[-1]['name']}" if own else ""
    cause = read_cause(lines[0])
    return with_cure(f"{cause + ': ' if cause in CAUSES else ''}{_cut(said)}{place}")


def is_own(file: str) -> bool:
    """Whether a file of a traceback is the user's."""
    return not (file.startswith((*LIBRARIES, "<frozen")) or "site-packages" in file)


def grouped(errors: Iterable[str]) -> list[tuple[int, str]]:
    """How many failed for each reason, with the first one's words, the commonest first. Numbers make no other reason."""
    found: dict[str, tuple[int, str]] = {}
    for error in errors:
        said = reason(error)
        kind = re.sub(r"\d+", "N", said)
        count, first = found.get(kind, (0, said))
        found[kind] = (count + 1, first)
    return sorted(found.values(), key=lambda each: -each[0])


def with_cure(error: str) -> str:
    """An agent's error; where it is vLLM's refusal of a prompt that is too long, with the setting that allows longer ones."""
    if "maximum context length" not in error or "policy_server.max_model_len" in error:
        return error
    return f"{error} (here that length is policy_server.max_model_len)"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
