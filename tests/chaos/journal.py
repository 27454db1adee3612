"""What the agents saw with their own eyes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Line:
    """A reply that an agent had wholly received at `at` (Unix seconds), or a reward that it was about to return."""

    at: float
    runner: str
    url: str
    rollout: str
    attempt: int
    reply: str = ""
    reward: float | None = None


class Journal:
    """Reads the lines as they come; a line that is not finished yet waits."""

    def __init__(self, file: Path) -> None:
        self._file, self._offset = file, 0
        self.lines: list[Line] = []
        file.touch()

    def read(self) -> list[Line]:
        """The lines that are new since the last call."""
        with self._file.open("rb") as journal:
            journal.seek(self._offset)
            data = journal.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [Line(**json.loads(line)) for line in whole.splitlines()]
        self.lines += new
        return new
