"""Which runs a client works for: those it was given, or every run of its project that has work.

The invariant: every run that begins to have work is found: one of the newest within `FIND_SECONDS`, an older one when its turn
comes. One that gave work lately is watched, so that its next rollouts are leased as soon as they are there. No task of finding
or watching ends unheard. A run that is not there yet is waited for, and so are servers that do not answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lightning.client.presence import Presence
from lightning.errors import DataError, StoreError, UnavailableError
from lightning.store.http import HttpStore
from lightning.types import Status

logger = logging.getLogger(__name__)

FIND_SECONDS = 5.0
NEWEST = 8
"""Runs that are looked at for work each time: a project trains a few at a time, and mostly its newest ones."""
OLDER = 32
"""Further runs that are looked at each time, in turn."""
WATCHED_SECONDS = 600.0
"""How long a run without work is watched: an optimizer step lies between two lots of it."""
ROUND = 25.0
DROPPED_SECONDS = 60.0
"""How long a run is left alone that servers refuse to lease from."""
AWAY_SECONDS = 1.0
"""Between two questions that no server answered."""
FINDING = "which runs have work"
"""What finding asks servers, as `Presence` knows it."""


class Runs:
    """The runs to lease from. `given` names them; empty: find them. No wait is longer than `longest` seconds. `presence` hears
    whether servers answer."""

    def __init__(
        self, store: HttpStore, given: Sequence[str], longest: float = math.inf, presence: Presence | None = None
    ) -> None:
        self._store, self._longest, self._presence = store, longest, presence or Presence()
        self._given = tuple(given)
        self._active = {run: time.monotonic() for run in given}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._finding: asyncio.Task[None] | None = None
        self._dropped: dict[str, float] = {}
        self._news = asyncio.Event()
        self._turn, self._looked_at = 0, ""

    def in_turn(self) -> list[str]:
        """The runs to ask, beginning with another one each time, so that none takes all the places."""
        runs = list(self._active)
        self._turn += 1
        first = self._turn % len(runs) if runs else 0
        return runs[first:] + runs[:first]

    def gave_work(self, run: str) -> None:
        """Keep watching this run."""
        self._active[run] = time.monotonic()

    def drop(self, run: str, error: StoreError) -> None:
        """Leave a run alone for a while that servers refuse to lease from. Raises the error when no other given one is left."""
        if self._given and set(self._active) <= {run}:
            raise error
        logger.warning("nothing is leased from run %s for %g s: %s", run, DROPPED_SECONDS, error)
        self._dropped[run] = time.monotonic() + DROPPED_SECONDS
        self._active.pop(run, None)
        if (watch := self._watches.pop(run, None)) is not None:
            watch.cancel()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Runs]:
        """For the length of the block runs are found and watched."""
        self._finding = finding = asyncio.create_task(self._find() if not self._given else self._follow())
        finding.add_done_callback(lambda _: self._news.set())
        try:
            yield self
        finally:
            tasks = [finding, *self._watches.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._watches.clear()

    async def wait(self, timeout: float) -> bool:
        """See `Watch.wait`. Raises what ended the finding or a watch, but for servers that are away."""
        for task in (self._finding, *self._watches.values()):
            if task is not None and task.done():
                task.result()
        try:
            await asyncio.wait_for(self._news.wait(), min(timeout, self._longest))
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def _find(self) -> None:
        while True:
            try:
                for run in await self._to_look_at():
                    if run not in self._active and not self._is_dropped(run) and await self._has_work(run):
                        self._active[run] = time.monotonic()
                        self._news.set()
            except UnavailableError as error:
                self._presence.away(FINDING, error)
            else:
                self._presence.back(FINDING)
            now = time.monotonic()
            self._active = {run: since for run, since in self._active.items() if now - since < WATCHED_SECONDS}
            self._watch_active()
            await asyncio.sleep(FIND_SECONDS)

    async def _to_look_at(self) -> list[str]:
        """The newest runs, and the next ones in turn of all that are older."""
        newest = [run.id for run in await self._store.newest_runs(NEWEST)]
        if len(newest) < NEWEST:
            return newest
        after, self._looked_at = self._looked_at or newest[-1], ""
        try:
            older = [run.id for run in await self._store.newest_runs(OLDER, after)]
        except DataError:  # that run was deleted meanwhile: begin again
            return newest
        self._looked_at = older[-1] if len(older) == OLDER else ""
        return list(dict.fromkeys([*newest, *older]))

    def _is_dropped(self, run: str) -> bool:
        if time.monotonic() < self._dropped.get(run, 0.0):
            return True
        self._dropped.pop(run, None)
        return False

    async def _follow(self) -> None:
        while True:
            for run in self._given:
                if run not in self._active and not self._is_dropped(run):
                    self._active[run] = time.monotonic()
            self._watch_active()
            await asyncio.sleep(FIND_SECONDS)

    def _watch_active(self) -> None:
        for run in self._active:
            if run not in self._watches:
                self._watches[run] = asyncio.create_task(self._watch(run), name=f"lightning-watch-{run}")
        for run in [run for run in self._watches if run not in self._active]:
            self._watches.pop(run).cancel()

    async def _watch(self, run: str) -> None:
        told = False
        while True:
            try:
                await self._heed(run)
            except UnavailableError:
                await asyncio.sleep(AWAY_SECONDS)
            else:
                if not told:
                    logger.warning(
                        "there is no run %r: waiting for it. If it has another name, start again with that", run
                    )
                    told = True
                await asyncio.sleep(FIND_SECONDS)

    async def _heed(self, run: str) -> None:
        """Tell of changes in a run. Returns when there is no such run, which may begin yet."""
        if await self._store.get_run(run) is None:  # not by the watch's refusal: it might begin right after that
            return
        try:
            async with self._store.watch(run) as watch:
                self._news.set()
                while True:
                    if await watch.wait(ROUND):
                        self._news.set()
        except UnavailableError:
            raise
        except StoreError:
            if await self._store.get_run(run) is not None:  # else it was deleted
                raise

    async def _has_work(self, run: str) -> bool:
        for status in (Status.PENDING, Status.RUNNING):
            if (await self._store.list_rollouts(run, status=status, limit=1)).rollouts:
                return True
        return False
