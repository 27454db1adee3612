"""Training states on disk, one folder per step, the newest few kept.

The invariant: the store says which step was committed; a checkpoint is only ever a cache of that step's weights, and one
that is newer than the last committed step is ignored. Steps since the newest one are trained again from the store, where a
plugin does that (`RunStage.bring_forward`); elsewhere they taught nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from lightning.errors import EngineError

logger = logging.getLogger(__name__)


LOST_TIME_RATIO = 10.0
"""How many times as long as writing a checkpoint the training may have taken that a crash would cost."""
UNFINISHED = ".step-*.new"
"""What a checkpoint is called while it is written (`engines.files.whole_folder`)."""
_FOLDER_NAME = re.compile(r"step-(\d{8})")


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
        matches = (_FOLDER_NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def newest(self, committed: int) -> int | None:
        """The newest checkpoint that is not ahead of the last committed step."""
        return max((step for step in self.steps() if step <= committed), default=None)

    def prune(self, committed: int) -> None:
        """Delete all but the newest `keep` among those up to the committed step."""
        for step in [step for step in self.steps() if step <= committed][: -self.keep]:
            shutil.rmtree(self.path(step))

    def discard(self, step: int) -> None:
        """Delete the checkpoint of a step, if there is one."""
        if self.path(step).is_dir():
            shutil.rmtree(self.path(step))

    def discard_after(self, committed: int) -> None:
        """Delete checkpoints of steps that were never committed: they will be taken again. So are those that a crash left half
        written, whose steps may never be saved again. Call it while nobody writes any."""
        for step in self.steps():
            if step > committed:
                shutil.rmtree(self.path(step))
        for unfinished in self.folder.glob(UNFINISHED):
            shutil.rmtree(unfinished)


class CheckpointWriter:
    """Writes training states beside the run, while agents sample: the engine's weights and moments stand still then, so that no
    copy of them is made. Use it with `async with`; who is told to stop writes what was trained since the last checkpoint.

    `save` writes the engine's present state. `every` is how many steps lie between two checkpoints; None: one is written when
    the training that a crash would cost has taken `LOST_TIME_RATIO` times as long as writing took the last time.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        save: Callable[[Path], None],
        every: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints, self._save, self._every, self._clock = checkpoints, save, every, clock
        self.newest = 0
        """The newest checkpoint that is on disk; 0: none."""
        self._done = 0
        self.unsaved = False
        """Whether steps that taught something were taken since."""
        self._whole = False
        self._lost = 0.0
        self._cost: float | None = None
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self._written()
            return
        try:
            await self._written()
            if isinstance(error, asyncio.CancelledError) and self._whole and self.unsaved:
                await self.write(self._done)
        except EngineError as failed:
            logger.warning("no checkpoint was written at the end: %s", failed)

    def restored(self, saved: int, done: int) -> None:
        """The engine was brought to where `done` steps lead, from the checkpoint of `saved` steps (0: from none)."""
        self.newest, self._done, self._whole, self.unsaved = saved, done, True, saved < done

    async def training(self) -> None:
        """The engine is about to change. Waits until what is being written is on disk; raises `EngineError` if it is not."""
        await self._written()
        self._whole = False

    async def write(self, done: int) -> None:
        """Write the state after `done` steps now, unless it is on disk. Raises `EngineError`."""
        began = self._clock()
        await asyncio.to_thread(self._save, self._checkpoints.path(done))
        self.newest, self.unsaved, self._cost, self._lost = done, False, self._clock() - began, 0.0

    async def finish(self) -> None:
        """No more steps come: wait for what is being written, and write the last state if it is not on disk."""
        await self._written()
        if self.unsaved:
            await self.write(self._done)

    def committed(self, done: int, *, taught: bool, seconds: float) -> None:
        """The engine is where `done` committed steps lead; the last took `seconds` to train. Begins to write, if it is time."""
        self._done, self._whole = done, True
        if not taught:
            return  # taken again it costs nothing
        if self.newest == done:
            return
        self.unsaved = True
        self._lost += seconds
        if self._every is None:
            due = self._cost is None or self._lost >= LOST_TIME_RATIO * self._cost
        else:
            due = done - self.newest >= self._every
        if due:
            self._writing = asyncio.create_task(self.write(done), name="lightning-checkpoint")

    async def _written(self) -> None:
        """A cancellation waits too, and takes effect then: the thread goes on in any case."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise
