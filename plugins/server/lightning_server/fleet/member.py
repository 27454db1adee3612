"""A gateway's seat among the gateways of one run: it follows the owner's notice, and stops serving in time when it cannot. Also
the policies of other trainers' runs that one gateway serves.

The invariant: a call is sent only while the gateway has its seat and its newest notice allows it. A call is unsure (its version
is not known) if it was in flight during an update that this gateway did not acknowledge, or while it had lost its seat.
`fleet.records` says why that is enough. A run is joined when its first key comes, and left when no call has come for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning.addresses import Allowed
from lightning.asyncio_utils import end
from lightning.errors import GatewayError, StoreError
from lightning.gateway.policy import RESTARTING, UNKNOWN, UPDATING, Policy
from lightning.gateway.upstream import Upstream
from lightning.policy_server.protocol import Update
from lightning.store.protocol import RunWatch, Store
from lightning.types import new_id

from lightning_server.fleet.owner import Owner
from lightning_server.fleet.pulse import Pulse
from lightning_server.fleet.records import (
    BEAT,
    GONE,
    LAPSE,
    Notice,
    Seat,
    Stance,
    alive_key,
    from_json,
    notice_of,
    now,
    seat_key,
    to_json,
)

log = logging.getLogger(__name__)

RETRY = 0.2
"""Seconds until the store is asked again after an error."""
OUT_OF_TOUCH = "This server has lost touch with the database, which says which weights are current,"


class Member:
    """One gateway's seat for one run. `policy` sends no calls until the notice has been read; then `follow` keeps it as the
    notice says."""

    def __init__(
        self,
        store: Store,
        run: str,
        hold_timeout: float,
        clock: Callable[[], float] = now,
        allowed: Allowed | None = None,
    ) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._allowed = allowed or Allowed()
        self._refused: tuple[Upstream, ...] = ()
        self.policy = Policy((), hold_timeout, check=self.check)
        self.policy.gate.close(self, OUT_OF_TOUCH)
        self._number, self._seat = 0, Seat("")
        self._valid_until = 0.0
        self._closed: set[int] = set()
        """The places of the servers whose calls wait."""
        self.seated = False
        """Whether the gateway has a seat, as far as it knows."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._owner = ""
        self._since = self._updated = 0
        self._heard: tuple[object, float] = (None, 0.0)
        self._orphaned = False

    async def follow(self) -> None:
        """Take a seat and follow the notice, for ever; take a new seat when it was lost."""
        complained = False
        while True:
            try:
                async with self._store.watch("") as watch:
                    await self._take_seat()
                    complained = False
                    await self._stay(watch)
            except StoreError as error:
                if not complained:
                    complained = True
                    log.warning("this gateway holds the calls of run %s until the store answers: %s", self._run, error)
            self.lapse("its store does not answer")
            await asyncio.sleep(RETRY)

    async def leave(self) -> None:
        """Give the seat up, and mark the calls in flight as unsure. Call it when `follow` has been cancelled."""
        seated = self.seated
        self.lapse("")
        if seated:
            try:
                await self._store.put_state(
                    "", seat_key(self._run, self._number), to_json(replace(self._seat, left=True))
                )
            except StoreError as error:
                log.info("the seat %d of run %s will be noticed to be empty: %s", self._number, self._run, error)
        await self.policy.close()

    def check(self) -> None:
        """Give the seat up if it was not renewed in time: the timer may come late when this process or its machine stood
        still."""
        if self.seated and self._clock() >= self._valid_until:
            self.lapse("its heartbeat came too late")

    def lapse(self, why: str) -> None:
        """Give the seat up: new calls wait, and those in flight are unsure. `why` is logged; empty: nothing is."""
        if not self.seated:
            return
        self.seated = False
        if self._timer is not None:
            self._timer.cancel()
        self.policy.gate.close(self, OUT_OF_TOUCH)
        lost = self.policy.lose()
        if why:
            log.warning(
                "this gateway no longer serves run %s, since %s; %d calls are not trained on", self._run, why, lost
            )

    # the seat ---------------------------------------------------------------------------------------------------
    async def _take_seat(self) -> None:
        notice = await notice_of(self._store, self._run)
        self._number = notice.first if notice else 0
        self._seat = Seat(new_id("gateway"))
        while True:
            began = self._clock()
            kept = await self._store.keep_state("", seat_key(self._run, self._number), to_json(self._seat))
            found = from_json(Seat, kept)
            if found is not None and found.id == self._seat.id:
                break
            self._number += 1
        self._owner, self._orphaned, self._heard = "", False, (None, 0.0)
        self.seated = True
        self._valid_until = began + LAPSE
        self._renewed(began)

    async def _stay(self, watch: RunWatch) -> None:
        """Follow the notice until the seat is lost. After an error the store is asked again."""
        while self.seated:
            try:
                notice = await notice_of(self._store, self._run)
                self.check()
                if self.seated:
                    await self._heed(notice)
                    self.policy.told = True
                if self.seated and self._clock() >= self._due:
                    await self._beat()
                if self.seated:
                    await watch.wait(max(self._due - self._clock(), 0.0))
            except StoreError as error:
                log.debug("the store refused the gateway of run %s: %s", self._run, error)
                await asyncio.sleep(RETRY)

    async def _beat(self) -> None:
        began = self._clock()
        self._seat = replace(self._seat, beat=self._seat.beat + 1)
        await self._store.put_state("", seat_key(self._run, self._number), to_json(self._seat), once=None)
        self._renewed(began)

    @property
    def overdue(self) -> bool:
        """Whether the loop has missed a heartbeat of a seat that has not expired (`fleet.pulse`)."""
        return self.seated and self._due + BEAT / 2 < self._clock() < self._valid_until

    async def beat_beside(self, number: int) -> None:
        """Write a heartbeat from a thread, as a negative number, and prolong the seat. Raises `StoreError`."""
        began, seat, place = self._clock(), self._seat, self._number
        if not self.seated or seat.id != self._seat.id:  # the loop may take another seat at any moment
            return
        await self._store.put_state("", seat_key(self._run, place), to_json(replace(seat, beat=-number)), once=None)
        if seat.id == self._seat.id and self._clock() < self._valid_until:
            self._valid_until = max(self._valid_until, began + LAPSE)

    def _renewed(self, began: float) -> None:
        """Prolong the seat: the store has acknowledged the heartbeat that began at `began`. It is too late once the seat has
        expired."""
        self._due = began + BEAT
        self.check()
        if not self.seated:
            return
        self._valid_until = began + LAPSE
        if self._timer is not None:
            self._timer.cancel()
        self._ring_later()

    def _ring_later(self) -> None:
        left = max(self._valid_until - self._clock(), 0.001)
        self._timer = asyncio.get_running_loop().call_later(left, self._rung)

    def _rung(self) -> None:
        self.check()
        if self.seated:  # the loop's clock was a little ahead
            self._ring_later()

    # the notice -------------------------------------------------------------------------------------------------
    async def _heed(self, notice: Notice | None) -> None:
        """Open or close the policy as the notice says; None means that no trainer has begun."""
        if notice is None:  # no trainer has begun: calls wait for a server, as during a restart
            self._serve(None)
            return
        if not self._account(notice):
            return
        if notice.stance is Stance.OPEN:
            self._orphaned, self._heard = False, (None, 0.0)
            self._seat = replace(self._seat, keys=())
            self._serve(notice)
            return
        if not self._orphaned and notice.stance is Stance.HELD and notice.holds is None:
            self.policy.gate.close(self, UPDATING)
        elif not self._orphaned:
            self._serve(notice)
        if notice.stance is Stance.HELD and self._seat.ack != notice.epoch:
            self.policy.freeze()
            self._seat = replace(self._seat, ack=notice.epoch, keys=tuple(self.policy.keys()))
            await self._beat()
        await self._listen(notice)

    def _account(self, notice: Notice) -> bool:
        """Update the versions of the calls in flight from the notice. Return False when the owner counts this gateway as
        gone."""
        if self._number < notice.first:  # gone; another gateway may have taken its number since
            self.lapse("its seat is gone")
            return False
        if notice.owner != self._owner:
            if self._owner:
                self.policy.lose()  # whatever the new owner did, it did not ask about these
            self._owner, self._since, self._updated = notice.owner, notice.epoch, notice.updated
            self._orphaned, self._heard = False, (None, 0.0)
            self.policy.pool.updated(notice.version)
        elif notice.ended > self._since and self._number not in notice.taken:
            self.lapse("the trainer went on without it")
            return False
        elif notice.updated > self._updated:
            self._updated = notice.updated
            self._update(notice)
        self.policy.seed = notice.seed
        return True

    def _update(self, notice: Notice) -> None:
        """Split the calls in flight at the servers whose weights have changed: later tokens are of the new version. Of those at
        a server that is away the versions are unknown, because it may not have taken the weights."""
        if notice.version == UNKNOWN:
            self.policy.lose()
        for server in notice.started_again:
            self.policy.lose(server)
        changed = None if notice.changed is None else notice.servers[notice.changed]
        if changed in (None, *(slot.upstream for slot in self.policy.pool.slots)):
            self.policy.update(Update(notice.version, notice.counts), changed)

    def _serve(self, notice: Notice | None) -> None:
        """Open the gate: calls go to the notice's servers, except to those that are away or held. With None, or where a server
        is not allowed, there are none."""
        versions = notice.version_of if notice is not None and notice.version != UNKNOWN else {}
        servers = tuple(versions)
        try:
            for server in servers:
                self._allowed.check(server.url)
            self.policy.pool.assign(servers, notice.started_again if notice is not None else ())
            for slot in self.policy.pool.slots:
                slot.version = versions.get(slot.upstream, slot.version)  # a vacant place has none
        except GatewayError as error:
            if servers != self._refused:
                log.error("calls of run %s find no policy server here: %s", self._run, error)  # noqa: TRY400 — is no fault
            self._refused = servers
            self.policy.pool.assign(())
        self._close_places(notice)
        self.policy.gate.open(self)

    def _close_places(self, notice: Notice | None) -> None:
        """Close the gate to the calls of the servers that are away or held according to the notice, or whose weights are
        unknown while those of others are known, and to no others."""
        why: dict[int, str] = {}
        if notice is not None:
            if notice.version != UNKNOWN:
                places = enumerate(notice.version_of.values())
                why = {place: UPDATING for place, version in places if version == UNKNOWN}
            why |= dict.fromkeys(notice.away, RESTARTING)
            if notice.holds is not None:
                why[notice.holds] = UPDATING
        for place in self._closed - why.keys():
            self.policy.gate.open((self, place))
        for place, reason in why.items():
            self.policy.gate.close((self, place), reason, place)
        self._closed = set(why)
        self.policy.gate.stir()  # calls of a server that was held and is away now go to another one

    async def _listen(self, notice: Notice) -> None:
        """While calls are held, watch the owner's heartbeat, because only the owner knows which weights the servers have. After
        `GONE` seconds without one the policy has no servers, and calls in flight in a `HELD` notice become unsure; a new
        heartbeat closes the gate again."""
        began = self._clock()
        alive = (notice.epoch, notice.stance, await self._store.get_state("", alive_key(self._run)))
        known, since = self._heard
        if alive != known:
            self._heard = (alive, self._clock())
            if self._orphaned:
                self._orphaned = False
                self.policy.gate.close(self, UPDATING)
        elif began - since > GONE and not self._orphaned:
            self._orphaned = True
            lost = self.policy.lose() if notice.stance is Stance.HELD else 0
            log.warning("the trainer of run %s fell silent while it held calls; %d are not trained on", self._run, lost)
            self._serve(None)


IDLE = 300.0
"""Seconds without a call after which a gateway leaves another trainer's run."""


class ServerFleet:
    """Gateways and trainers that talk to each other through the store."""

    def owner(self, store: Store, run: str, seed: int | None) -> Owner:
        """Return the trainer's end for a run whose calls are seeded with `seed` (None: not seeded)."""
        return Owner(store, run, seed=seed)

    def others(self, store: Store, hold_timeout: float, allowed: Allowed) -> JoinedRuns:
        """Return the gateway's end: the policies of other trainers' runs. Their servers must be `allowed`."""
        return JoinedRuns(store, hold_timeout, allowed)

    async def served_version(self, store: Store, run: str) -> int | None:
        """Return the version of a run's policy that its servers have; None where it has none, or nobody knows it."""
        notice = await notice_of(store, run)
        return notice.version if notice is not None and notice.servers and notice.version != UNKNOWN else None


class JoinedRuns:
    """The policies of other trainers' runs that one gateway serves."""

    def __init__(self, store: Store, hold_timeout: float, allowed: Allowed) -> None:
        self._store, self._hold_timeout, self._allowed = store, hold_timeout, allowed
        self._joined: dict[str, Member] = {}
        self._staying: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def known(self) -> list[Policy]:
        """The policies of the runs that are joined now."""
        return [member.policy for member in self._joined.values()]

    def of(self, run: str) -> Policy:
        """Return the policy of a run, which is joined if it was not."""
        member = self._joined[run] if run in self._joined else self._join(run)
        member.policy.used = asyncio.get_running_loop().time()
        return member.policy

    def _join(self, run: str) -> Member:
        member = Member(self._store, run, self._hold_timeout, allowed=self._allowed)
        self._joined[run] = member
        task = asyncio.create_task(self._stay(run, member), name=f"lightning-gateway-{run}")
        self._staying.add(task)
        task.add_done_callback(partial(self._ended, run, member))
        return member

    async def _stay(self, run: str, member: Member) -> None:
        """Follow a run's notice until no call has come for `IDLE` seconds."""
        following = asyncio.create_task(member.follow())
        loop = asyncio.get_running_loop()
        try:
            with Pulse(member):
                while True:
                    await asyncio.wait({following}, timeout=IDLE / 10)
                    if following.done():
                        following.result()
                    if loop.time() - member.policy.used > IDLE and not member.policy.calls:
                        return
        finally:
            self._forget(run, member)  # a call that comes while it leaves joins anew
            await end(following)

    def _ended(self, run: str, member: Member, task: asyncio.Task[None]) -> None:
        """Leave a run whose task has ended: it was idle, closed, or failed unexpectedly. The run's next call joins it anew."""
        self._staying.discard(task)
        self._forget(run, member)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the gateway stopped to follow run %s", run, exc_info=error)
        leaving = asyncio.ensure_future(member.leave())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _forget(self, run: str, member: Member) -> None:
        if self._joined.get(run) is member:
            del self._joined[run]

    async def close(self) -> None:
        """Leave every run."""
        await end(*self._staying)
        await asyncio.sleep(0)  # the callbacks of the tasks run now
        await asyncio.gather(*self._leaving, return_exceptions=True)
