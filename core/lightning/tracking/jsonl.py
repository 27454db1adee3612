"""The `jsonl` tracker: one line of JSON for each call, appended to `metrics.jsonl` in the run's folder.

The invariant: every complete line is valid JSON (not-a-number becomes null); a line that a crash cut short is removed when the
run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import orjson

from lightning.hooks import hookimpl
from lightning.types import Json

if TYPE_CHECKING:
    from lightning.hooks import RegisterTracker


@hookimpl
def register_trackers(register: RegisterTracker) -> None:
    """Register the tracker `jsonl`, which is used where the settings name none."""
    register("jsonl", lambda _: JsonLines(), usual=True)


FILE = "metrics.jsonl"


class JsonLines:
    """Appends `{"step": ..., "at": <Unix time>, ...values}` lines."""

    _file: BinaryIO

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Open the file for appending."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("ab+")
        self._file.truncate(_complete(self._file))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line, visible to readers at once."""
        self._file.write(orjson.dumps({"step": step, "at": time.time(), **values}) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _complete(file: BinaryIO) -> int:
    """Return how many bytes of the file are complete lines."""
    file.seek(0)
    return file.read().rfind(b"\n") + 1
