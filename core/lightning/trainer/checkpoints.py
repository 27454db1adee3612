"""Training states on disk: one folder per step, the newest few kept.

The invariant: the store says which step was committed; a checkpoint is only ever a cache of that step's weights, and one
that is newer than the last committed step is ignored.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The checkpoints of one run, under `folder`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        """Where the state after `step` optimizer steps belongs."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def newest(self, committed: int) -> int | None:
        """The newest checkpoint that is not ahead of the last committed step."""
        return max((step for step in self.steps() if step <= committed), default=None)

    def prune(self, committed: int) -> None:
        """Delete all but the newest `keep` among those up to the committed step."""
        for step in [step for step in self.steps() if step <= committed][: -self.keep]:
            shutil.rmtree(self.path(step))

    def discard_after(self, committed: int) -> None:
        """Delete checkpoints of steps that were never committed: they will be taken again."""
        for step in self.steps():
            if step > committed:
                shutil.rmtree(self.path(step))
