"""Notes that people left at a run, in the store's state.

The invariant: a note is written once, under a number of its own, so that two people who write at a time lose nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from lightning.errors import DataError, LightningError
from lightning.types import Json

from lightning_console.places import Located

MOST: Final = 100
"""Notes of a run."""
LONGEST: Final = 4_000
"""Characters of a note."""


@dataclass(frozen=True, slots=True)
class Note:
    """What somebody wrote. `at` is Unix time."""

    text: str
    by: str
    at: float


async def notes(located: Located) -> list[Note]:
    """The notes of a run, oldest first. None where the store does not tell its state to whoever asks (a viewer's token)."""
    found: list[Note] = []
    try:
        for number in range(MOST):
            kept = await located.store.get_state(located.run.id, _key(number))
            if not isinstance(kept, dict):
                break
            found.append(_note(kept))
    except LightningError:
        return found
    return found


async def add_note(located: Located, text: str, by: str) -> Note:
    """Leave a note. Raises `DataError` for one that is empty or too long, and where there are too many."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        raise DataError(f"a note has 1 to {LONGEST} characters, and this one has {len(text)}")
    mine: dict[str, Json] = {"text": text, "by": by, "at": time.time()}
    for number in range(MOST):
        if await located.store.keep_state(located.run.id, _key(number), mine) == mine:
            return _note(mine)
    raise DataError(f"the run {located.run.id!r} has {MOST} notes already, and takes no more")


def _key(number: int) -> str:
    return f"console_note_{number}"


def _note(kept: dict[str, Json]) -> Note:
    at = kept.get("at")
    return Note(str(kept.get("text", "")), str(kept.get("by", "")), float(at) if isinstance(at, (int, float)) else 0.0)
