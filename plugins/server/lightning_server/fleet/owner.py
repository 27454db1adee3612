"""The trainer's end of a fleet: it announces where its policy is served, and holds every gateway's calls while that changes.

The invariant: weights change only inside `hold`, after each gateway that may have sent a call has stopped sending or is gone.
What is announced afterwards is true: the new version, the old one, or that the version is not known. `fleet.records` describes
the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count

from lightning.asyncio_utils import end, to_its_end
from lightning.errors import ConflictError, GatewayError, PolicyServerError, StoreError
from lightning.gateway.policy import UNKNOWN, Hold, PolicyOwner
from lightning.gateway.upstream import Upstream
from lightning.store.protocol import Store
from lightning.types import new_id

from lightning_server.fleet.records import (
    BEAT,
    GONE,
    Notice,
    Seat,
    Stance,
    alive_key,
    from_json,
    notice_key,
    notice_of,
    now,
    seat_key,
    to_json,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seen:
    """A seat as it was last read, and since when its heartbeat is unchanged (the owner's clock)."""

    seat: Seat
    since: float


class Owner(PolicyOwner):
    """The owner of a run's policy, which tells gateways through the store. Methods raise `ConflictError` when another owner has
    taken over."""

    def __init__(self, store: Store, run: str, *, seed: int | None = None, clock: Callable[[], float] = now) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._notice = Notice(new_id("owner"), 0, Stance.PAUSED, UNKNOWN, 0, (), seed=seed)
        self._first = 0
        self._seen: dict[int, _Seen] = {}
        self._gone: set[int] = set()
        self._changing = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._observer: asyncio.Task[None] | None = None

    @property
    def others(self) -> int:
        """How many gateways besides the owner's own served the run when the seats were last read."""
        return len(self._seen)

    async def open(self, servers: Sequence[Upstream], version: int) -> None:
        """Take the run over and announce the servers, of weights `version` (`UNKNOWN`: they get no calls before the first
        update)."""
        before = await notice_of(self._store, self._run)
        epoch, self._first = (before.epoch + 1, before.first) if before else (1, 0)
        self._notice = replace(
            self._notice,
            epoch=epoch,
            versions=(),
            away=(),
            updated=epoch - (not servers),  # `serve` says the version for the first time, which is news at this epoch
            version=max(version, UNKNOWN),
            servers=tuple(servers),
        )
        await self._announce()

    async def serve(self, servers: Sequence[Upstream], version: int) -> None:
        """Announce the servers and their version, after `open` without servers and before the first hold."""
        async with self._changing:
            await self._check_owner()
            notice = replace(self._notice, version=max(version, UNKNOWN), servers=tuple(servers), versions=(), away=())
            self._notice = replace(notice, updated=notice.epoch, changed=None)
            await self._announce()

    async def close(self) -> None:
        """Announce that the run has no servers any more. An error of the store is only logged."""
        if self._observer is not None:
            await end(self._observer)
            self._observer = None
        await self._rest()
        try:
            await self._check_owner()
            self._notice = replace(self._notice, servers=(), versions=(), away=(), counts={})
            await self._announce()
        except StoreError as error:
            log.info("the gateways of run %s were not told that its policy server stops: %s", self._run, error)

    @asynccontextmanager
    async def hold(self, server: Upstream | None = None) -> AsyncIterator[Hold]:
        """For the length of the block no gateway sends calls to this server, or with None to any, and the calls in flight are
        known. The block sets what changed on the `Hold`, which is announced afterwards. After a `PolicyServerError` the old
        version goes on; after any other error it is not known."""
        async with self._changing:
            hold, place = Hold(), None if server is None else self._place(server)
            async with self._closed(place) as closed:
                keys: list[str] = []
                try:
                    keys = await self._gather()
                    try:
                        yield hold
                    except PolicyServerError:
                        raise
                    except BaseException:
                        hold.lost = hold.update is None
                        raise
                finally:
                    closed.notice = self._outcome(replace(closed.notice, taken=tuple(self._seen)), place, hold, keys)
            self._observe()

    async def away(self, server: Upstream) -> None:
        """Announce that this server is started again: it gets no calls before `back`, and calls wait while all servers are."""
        async with self._changing:
            await self._check_owner()
            self._notice = self._without(self._notice, [server])
            await self._announce()

    async def back(self, server: Upstream, now: Upstream, version: int) -> None:
        """Announce that the server that was `away` is `now` this one, with the weights of `version`."""
        async with self._changing:
            await self._check_owner()
            notice, place = self._notice, self._place(server)
            servers, versions = list(notice.servers), list(notice.version_of.values())
            servers[place], versions[place] = now, version
            away = tuple(number for number in notice.away if number != place)
            self._notice = replace(notice, servers=tuple(servers), versions=tuple(versions), away=away)
            await self._announce()

    def _without(self, notice: Notice, servers: Sequence[Upstream]) -> Notice:
        """Return the notice with these servers away, too."""
        return replace(notice, away=tuple(sorted({*notice.away, *map(self._place, servers)})))

    def _place(self, server: Upstream) -> int:
        if server not in self._notice.servers:
            raise GatewayError(f"{server} is none of the policy servers of run {self._run}")
        return self._notice.servers.index(server)

    def _outcome(self, notice: Notice, place: int | None, hold: Hold, keys: Sequence[str]) -> Notice:
        notice = self._without(notice, hold.away)
        if hold.lost:
            return replace(notice, version=UNKNOWN, versions=(), updated=notice.epoch, changed=None, counts={})
        if (update := hold.update) is None and not hold.away:
            return notice
        if update is None:  # other gateways must know that tokens of the server that is away may be of either version
            return replace(notice, updated=notice.epoch, changed=self._place(hold.away[0]), counts={})
        counts = {key: update.in_flight[key] for key in keys if key in update.in_flight}
        versions = tuple(
            had if place not in (None, number) or number in notice.away else update.version
            for number, had in enumerate(notice.version_of.values())
        )
        return replace(
            notice, version=update.version, versions=versions, updated=notice.epoch, changed=place, counts=counts
        )

    # the notice -------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _closed(self, place: int | None) -> AsyncIterator[_After]:
        """For the length of the block gateways hold the calls of the server in this place (None: of all); then announce the
        notice that the block left in `_After`."""
        await self._check_owner()
        after = _After(replace(self._notice, epoch=self._notice.epoch + 1))
        self._notice = replace(after.notice, holds=place)
        try:
            await self._announce(held=True)
            yield after
        finally:
            self._notice = replace(after.notice, holds=None)
            await to_its_end(self._announce())  # even if cancelled, or `close` would announce at the same time

    async def _announce(self, *, held: bool = False) -> None:
        """Write the notice, in the stance that it says; while calls wait, heartbeats are written, too."""
        while self._first in self._gone:
            self._gone.discard(self._first)
            self._first += 1
        none = bool(self._notice.servers) and len(self._notice.away) == len(self._notice.servers)
        stance = Stance.HELD if held else Stance.PAUSED if none else Stance.OPEN
        self._notice = replace(self._notice, stance=stance, first=self._first)
        if stance is Stance.OPEN:
            await self._rest()
        elif self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        await self._store.put_state("", notice_key(self._run), to_json(self._notice))

    async def _check_owner(self) -> None:
        kept = await notice_of(self._store, self._run)
        if kept is None or kept.owner != self._notice.owner:
            raise ConflictError(
                f"another trainer has taken over run {self._run!r} in this store: end one of the two, and resume the other"
            )

    async def _rest(self) -> None:
        """End the heartbeats."""
        if self._beating is not None:
            await end(self._beating)
            self._beating = None

    async def _beat(self) -> None:
        """Write the owner's heartbeat once a second."""
        for number in count():
            await asyncio.sleep(BEAT)
            with suppress(StoreError):  # gateways that hear nothing stop waiting; what fails here fails the hold, too
                await self._store.put_state("", alive_key(self._run), [self._notice.epoch, number], once=None)

    # the seats --------------------------------------------------------------------------------------------------
    async def _gather(self) -> list[str]:
        """Wait until each seat has acknowledged the epoch or is gone. Return the keys of all calls in flight."""
        if await self._unready():
            async with self._store.watch("") as watch:
                while await self._unready():
                    await watch.wait(BEAT / 4)
        return [key for seen in self._seen.values() for key in seen.seat.keys]

    async def _unready(self) -> bool:
        await self._look()
        return any(seen.seat.ack != self._notice.epoch for seen in self._seen.values())

    async def _look(self) -> None:
        """Read every seat that is not gone."""
        for number in count(self._first):
            if number in self._gone:
                continue
            asked = self._clock()
            seat = from_json(Seat, await self._store.get_state("", seat_key(self._run, number)))
            if seat is None:
                return
            seen = self._seen.get(number)
            if seat.left:
                self._dismiss(number)
            elif seen is None or seen.seat.beat != seat.beat:
                self._seen[number] = _Seen(seat, self._clock())
            elif asked - seen.since > GONE:
                log.warning("gateway %s no longer serves run %s: no sign of life for %g s", seat.id, self._run, GONE)
                self._dismiss(number)
            else:
                seen.seat = seat

    def _dismiss(self, number: int) -> None:
        self._seen.pop(number, None)
        self._gone.add(number)

    def _observe(self) -> None:
        """Read the seats between holds, so that the next hold need not wait for a gateway that is gone."""
        if self._seen and (self._observer is None or self._observer.done()):
            self._observer = asyncio.create_task(self._look_on(), name="lightning-fleet")

    async def _look_on(self) -> None:
        while self._seen:
            await asyncio.sleep(BEAT)
            async with self._changing:
                with suppress(StoreError):  # a hold asks again, and says what it could not learn
                    await self._look()


@dataclass(slots=True)
class _After:
    """The notice that is announced when the block of a hold ends."""

    notice: Notice
