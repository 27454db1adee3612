"""Which runs a client works for: those it was given, or every run of its project that has work.

The invariant: every run that begins to have work is found: one of the newest within `FIND_SECONDS`, an older one when its turn
comes. One that gave work lately is watched, so that its next rollouts are leased as soon as they are there. No task of finding
or watching ends unheard. A run that is not there yet is waited for, and so are servers that do not answer. What servers refuse
is asked again after growing pauses; only a refused token ends the client at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lightning.asyncio_utils import cancel, is_set_within
from lightning.errors import DataError, LightningError, StoreError, UnavailableError
from lightning.types import Status

from lightning_server.client.server_presence import Presence
from lightning_server.http_store import HttpStore
from lightning_server.http_store.transport import TokenRefusedError

logger = logging.getLogger(__name__)

FIND_SECONDS = 5.0
NEWEST = 8
"""Runs that are looked at for work each time: a project trains a few at a time, and mostly its newest ones."""
OLDER = 32
"""Further runs that are looked at each time, in turn."""
WATCHED_SECONDS = 600.0
"""How long a run without work is watched: an optimizer step lies between two lots of it."""
ROUND = 25.0
FIRST_PAUSE, DROPPED_SECONDS = 5.0, 60.0
"""How long what servers refuse is left alone: the first time, and at most."""
AWAY_SECONDS = 1.0
"""Between two questions that no server answered."""
FINDING = "which runs have work"
"""What finding asks servers, as `Presence` knows it."""


class Runs:
    """The runs to lease from. `given` names them; empty: find them. No wait is longer than `longest` seconds. `presence` hears
    whether servers answer. Given runs that are all refused for `patience` seconds are an error."""

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
        """The runs to ask, beginning with another one each time, so that none takes all the places."""
        runs = list(self._active)
        self._turn += 1
        first = self._turn % len(runs) if runs else 0
        return runs[first:] + runs[:first]

    def gave_work(self, run: str) -> None:
        """Keep watching this run."""
        self._active[run] = time.monotonic()
        self._alive.add(run)

    def answered(self, run: str, over: bool) -> None:
        """Servers refuse this run no more, and say whether it is over."""
        self._refused.pop(_leasing(run), None)
        if not over:
            self._alive.add(run)
            self._over.discard(run)
        elif run not in self._over:
            self._over.add(run)
            if run in self._given and run not in self._alive:
                logger.warning("run %s was over before this client began: waiting for it to be resumed", run)

    def unanswered(self) -> None:
        """No server says any more which runs are over."""
        self._over.clear()

    @property
    def are_over(self) -> bool:
        """Whether runs were given and have all come to their end while this client was there. One that was over before may
        be about to be resumed."""
        return bool(self._given) and (self._over & self._alive).issuperset(self._given)

    def drop(self, run: str, error: LightningError) -> None:
        """Leave a run alone for a while that servers refuse to lease from. Raises the error when they have refused all
        the given ones for long that are not over."""
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
        """For the length of the block runs are found and watched."""
        self._finding = finding = asyncio.create_task(self._find() if not self._given else self._follow())
        finding.add_done_callback(lambda _: self._news.set())
        try:
            yield self
        finally:
            await cancel(finding, *self._watches.values())
            self._watches.clear()

    async def wait(self, timeout: float) -> bool:
        """See `RunWatch.wait`. Raises what ended the finding or a watch: `TokenRefusedError`, or what should not happen."""
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
        """Lease from those that have work, from now on. One about which servers refuse to say it is left alone for a while."""
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
        """The newest runs, and the next ones in turn of all that are older."""
        newest = await self._listed(NEWEST)
        if len(newest) < NEWEST:
            return newest
        after, self._looked_at = self._looked_at or newest[-1], ""
        try:
            older = await self._listed(OLDER, after)
        except DataError:  # that run was deleted meanwhile: begin again
            return newest
        self._looked_at = older[-1] if len(older) == OLDER else ""
        return list(dict.fromkeys([*newest, *older]))

    async def _listed(self, limit: int, after: str = "") -> list[str]:
        """Ids of runs."""
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
        told = False
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
        """Seconds for which to leave alone what servers refuse, more each time. It is told at once, and where it lasts."""
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
