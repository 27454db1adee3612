"""Why attempts failed, in a line: the exception, and the place in the user's own code; alike ones together.

The invariant: the same words in a dry run, in training's warnings and in `lightning runs`, read from the error that was stored.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lightning
from lightning.runner.outcomes import CAUSES, read_cause

FRAME: Final = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$')
GROUP: Final = re.compile(r"^(?: +\+ (?=Exception Group)|(?: *\| ?)+)")
"""Before the lines of a group of exceptions."""
EXCEPTION: Final = re.compile(r"[^\W\d][\w.<>]*(?:: |$)")
"""How the line of an exception begins."""
LIBRARIES: Final = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(lightning.__file__).parent),
    }
)
"""Folders of code that is not the user's; `site-packages` of other machines as well."""
LONGEST: Final = 300
"""Characters of a reason."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an attempt failed; as a text it is a line: `KeyError: 'answer' at my_agent.py:12 in solve`.

    `cause` is one of `runner.outcomes.CAUSES`, empty unless the policy is at fault. `exception` is the class as a
    traceback names it, `place` the innermost frame in the user's code; both are empty where the error is no traceback. `cure`
    is what can be done, where that is known.
    """

    cause: str = ""
    exception: str = ""
    message: str = ""
    place: str = ""
    cure: str = ""

    def __str__(self) -> str:
        said = ": ".join(part for part in (self.cause, self.exception, self.message) if part)
        return f"{said}{f' at {self.place}' if self.place else ''}{f' ({self.cure})' if self.cure else ''}"


def reason(error: str) -> Reason:
    """What a stored error says: of a traceback the last exception, of any other text the first line."""
    lines = [GROUP.sub("", line) for line in error.strip().splitlines()]
    frames = [(number, found) for number, line in enumerate(lines) if (found := FRAME.match(line))]
    if not frames:
        return Reason(message=_cut(lines[0]) if lines else "no reason was given", cure=_cure(lines[0] if lines else ""))
    said = next(
        (line for line in lines[frames[-1][0] + 1 :] if line[:1].strip() and not set(line) <= set("~^ |+-")), ""
    )
    own = [found for _, found in frames if is_own(found["file"])]
    exception, _, message = said.partition(": ") if EXCEPTION.match(said) else ("", "", said)
    return Reason(
        cause=cause if (cause := read_cause(lines[0])) in CAUSES else "",
        exception=exception,
        message=_cut(message),
        place=f"{Path(own[-1]['file']).name}:{own[-1]['line']} in {own[-1]['name']}" if own else "",
        cure=_cure(said),
    )


def is_own(file: str) -> bool:
    """Whether a file of a traceback is the user's."""
    return not (file.startswith((*LIBRARIES, "<frozen")) or "site-packages" in file)


def grouped(errors: Iterable[str]) -> list[tuple[int, Reason]]:
    """How many failed for each reason, with the first one's words, the commonest first. Numbers make no other reason."""
    found: dict[str, tuple[int, Reason]] = {}
    for error in errors:
        said = reason(error)
        kind = re.sub(r"\d+", "N", str(said))
        count, first = found.get(kind, (0, said))
        found[kind] = (count + 1, first)
    return sorted(found.values(), key=lambda each: -each[0])


def _cure(error: str) -> str:
    """What helps where the error is vLLM's refusal of a prompt that is too long."""
    if "maximum context length" not in error or "policy_server.max_model_len" in error:
        return ""
    return "here that length is policy_server.max_model_len"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
