"""Which runs a client works for: those it was given, or every run of its project that has work.

The invariant: every run that gets work is found: one of the newest runs within `FIND_SECONDS`, an older one when its turn
comes. A run that gave work lately is watched, so that its next rollouts are leased at once. An error that ends a task of
finding or watching is raised by `wait`. A run that does not exist yet is waited for, and so are servers that do not answer.
What servers refuse is asked again after growing pauses; only a refused token ends the client at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lightning.asyncio_utils import cancel, is_set_within
from lightning.bounded import Once
from lightning.errors import DataError, LightningError, StoreError, UnavailableError
from lightning.types import Status

from lightning_server.client.server_presence import Presence
from lightning_server.http_store import HttpStore
from lightning_server.http_store.transport import TokenRefusedError

logger = logging.getLogger(__name__)

FIND_SECONDS = 5.0
NEWEST = 8
"""The newest runs, which are checked for work each time: a project usually trains a few of its newest runs."""
OLDER = 32
"""Older runs that are checked each time, in turn."""
WATCHED_SECONDS = 600.0
"""Seconds for which a run without work is watched: between two batches of rollouts lies an optimizer step."""
ROUND = 25.0
FIRST_PAUSE, DROPPED_SECONDS = 5.0, 60.0
"""The first and the longest pause in seconds after servers have refused something."""
AWAY_SECONDS = 1.0
"""Seconds between two requests that no server answered."""
FINDING = "which runs have work"
"""The kind of request that finding makes, for `Presence`."""


class Runs:
    """The runs to lease from. `given` names them; empty: they are found. No wait is longer than `longest` seconds. `presence`
    is told whether servers answer. It is an error if servers refuse all given runs for `patience` seconds."""

    def __init__(
        self,
        store: HttpStore,
        given: Sequence[str],
        longest: float = math.inf,
        presence: Presence | None = None,
        patience: float = DROPPED_SECONDS,
    ) -> None:
        self._store, self._longest, self._presence = store, longest, presence or Presence()
        self._given, self._patience = tuple(given), patience
        self._active = {run: time.monotonic() for run in given}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._finding: asyncio.Task[None] | None = None
        self._dropped: dict[str, float] = {}
        self._refused: dict[str, float] = {}  # seconds for which what servers refuse was left alone until now
        self._alive: set[str] = set()  # given runs that were not over at some time since this client began
        self._over: set[str] = set()
        self._news = asyncio.Event()
        self._turn, self._looked_at = 0, ""

    def in_turn(self) -> list[str]:
        """Return the runs to lease from, beginning with another one each time, so that no run takes all places."""
        runs = list(self._active)
        self._turn += 1
        first = self._turn % len(runs) if runs else 0
        return runs[first:] + runs[:first]

    def gave_work(self, run: str) -> None:
        """Note that a run gave work: it is watched on."""
        self._active[run] = time.monotonic()
        self._alive.add(run)

    def answered(self, run: str, over: bool) -> None:
        """Note that servers answered a lease request for this run, and whether the run is over."""
        self._refused.pop(_leasing(run), None)
        if not over:
            self._alive.add(run)
            self._over.discard(run)
        elif run not in self._over:
            self._over.add(run)
            if run in self._given and run not in self._alive:
                logger.warning("run %s was over before this client began: waiting for it to be resumed", run)

    def unanswered(self) -> None:
        """Note that no server answers: it is no longer known which runs are over."""
        self._over.clear()

    @property
    def are_over(self) -> bool:
        """Whether runs were given and all of them ended while this client worked for them. A run that was over before the
        client began does not count, since it may be resumed."""
        return bool(self._given) and (self._over & self._alive).issuperset(self._given)

    def drop(self, run: str, error: LightningError) -> None:
        """Stop leasing from a run for a while, because servers refused to. Raises `error` when they have refused all given runs
        that are not over for `patience` seconds."""
        self._over.discard(run)
        left = set(self._given) - self._over
        if left and all(self._refused.get(_leasing(one), -1.0) >= self._patience for one in left):
            raise error
        self._dropped[run] = time.monotonic() + self._pause(_leasing(run), error)
        self._active.pop(run, None)
        if (watch := self._watches.pop(run, None)) is not None:
            watch.cancel()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Runs]:
        """Find and watch runs for the length of the block."""
        self._finding = finding = asyncio.create_task(self._find() if not self._given else self._follow())
        finding.add_done_callback(lambda _: self._news.set())
        try:
            yield self
        finally:
            await cancel(finding, *self._watches.values())
            self._watches.clear()

    async def wait(self, timeout: float) -> bool:
        """Wait for news of any run, `timeout` seconds at most; return whether there was some. Raises the error that ended the
        finding or a watch: `TokenRefusedError`, or an unexpected one."""
        for task in (self._finding, *self._watches.values()):
            if task is not None and task.done():
                task.result()
        if not await is_set_within(self._news, min(timeout, self._longest)):
            return False
        self._news.clear()
        return True

    async def _find(self) -> None:
        what = "no run is looked for"
        while True:
            pause = FIND_SECONDS
            try:
                await self._look(await self._to_look_at())
            except UnavailableError as error:
                self._presence.away(FINDING, error)
            except TokenRefusedError:
                raise
            except LightningError as error:
                pause = self._pause(what, error)
            else:
                self._presence.back(FINDING)
                self._refused.pop(what, None)
            now = time.monotonic()
            self._active = {run: since for run, since in self._active.items() if now - since < WATCHED_SECONDS}
            self._watch_active()
            await asyncio.sleep(pause)

    async def _look(self, runs: list[str]) -> None:
        """Check which of these runs have work, and lease from those from now on. A run about which servers refuse to answer is
        dropped for a while."""
        for run in runs:
            if run in self._active or self._is_dropped(run):
                continue
            try:
                found = await self._has_work(run)
            except (UnavailableError, TokenRefusedError):
                raise
            except LightningError as error:
                self.drop(run, error)
                continue
            if found:
                self._active[run] = time.monotonic()
                self._news.set()

    async def _to_look_at(self) -> list[str]:
        """Return the ids of the newest runs, and of the next ones in turn of all older runs."""
        newest = await self._listed(NEWEST)
        if len(newest) < NEWEST:
            return newest
        after, self._looked_at = self._looked_at or newest[-1], ""
        try:
            older = await self._listed(OLDER, after)
        except DataError:  # the run `after` was deleted meanwhile: begin again
            return newest
        self._looked_at = older[-1] if len(older) == OLDER else ""
        return list(dict.fromkeys([*newest, *older]))

    async def _listed(self, limit: int, after: str = "") -> list[str]:
        """Return ids of at most `limit` runs, newest first, those after the run `after`."""
        return [run.id for run in await self._store.list_runs(after=after, limit=limit, brief=True)]

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
        told = Once()
        while True:
            try:
                await self._heed(run)
            except UnavailableError:
                await asyncio.sleep(AWAY_SECONDS)
            except TokenRefusedError:
                raise
            except LightningError as error:
                await asyncio.sleep(self._pause(_watching(run), error))
            else:
                if told.first():
                    logger.warning(
                        "there is no run %r: waiting for it. If it has another name, start again with that", run
                    )
                await asyncio.sleep(FIND_SECONDS)

    async def _heed(self, run: str) -> None:
        """Watch a run and report each change as news. Returns when the run does not exist; it may be created later."""
        if await self._store.get_run(run) is None:  # a refused watch would not tell: the run might begin right after
            return
        try:
            async with self._store.watch(run) as watch:
                self._news.set()
                while True:
                    if await watch.wait(ROUND):
                        self._news.set()
                    self._refused.pop(_watching(run), None)
        except UnavailableError:
            raise
        except StoreError:
            if await self._store.get_run(run) is not None:  # else it was deleted
                raise

    async def _has_work(self, run: str) -> bool:
        for status in (Status.PENDING, Status.RUNNING):
            if (await self._store.list_rollouts(run, status=status, limit=1)).items:
                return True
        return False

    def _pause(self, what: str, error: LightningError) -> float:
        """Return the pause in seconds before servers are asked again for what they refused; it grows each time. The first
        refusal and lasting ones are logged as warnings."""
        before = self._refused.get(what, 0.0)
        pause = min(max(before, FIRST_PAUSE), DROPPED_SECONDS)
        self._refused[what] = before + pause
        level = logging.INFO if 0 < before < DROPPED_SECONDS else logging.WARNING
        logger.log(level, "%s for %g s, then servers are asked again: %s", what, pause, error)
        return pause


def _leasing(run: str) -> str:
    return f"nothing is leased from run {run}"


def _watching(run: str) -> str:
    return f"no news of run {run} is heard"
