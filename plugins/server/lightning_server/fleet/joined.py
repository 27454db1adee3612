"""The runs of elsewhere that a gateway serves, and the plugin's word for all of a fleet.

The invariant: a run is joined when its first key comes, and left when none has come for a while.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from lightning.addresses import Allowed
from lightning.asyncio_utils import end
from lightning.gateway.policy import UNKNOWN, Policy
from lightning.store.protocol import Store

from lightning_server.fleet.member import Member
from lightning_server.fleet.owner import Owner
from lightning_server.fleet.records import Notice, notice_key

log = logging.getLogger(__name__)

IDLE = 300.0
"""Seconds without a call after which a run of somebody else's is left."""


class ServerFleet:
    """A `Fleet` whose gateways and trainers meet in the store."""

    def owner(self, store: Store, run: str, seed: int | None) -> Owner:
        """See `Fleet.owner`."""
        return Owner(store, run, seed=seed)

    def others(self, store: Store, hold_timeout: float, allowed: Allowed) -> JoinedRuns:
        """See `Fleet.others`."""
        return JoinedRuns(store, hold_timeout, allowed)

    async def served_version(self, store: Store, run: str) -> int | None:
        """See `Fleet.served_version`."""
        notice = Notice.from_json(await store.get_state("", notice_key(run)))
        return notice.version if notice is not None and notice.servers and notice.version != UNKNOWN else None


class JoinedRuns:
    """The `OtherPolicies` of one gateway."""

    def __init__(self, store: Store, hold_timeout: float, allowed: Allowed) -> None:
        self._store, self._hold_timeout, self._allowed = store, hold_timeout, allowed
        self._joined: dict[str, Member] = {}
        self._staying: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def known(self) -> list[Policy]:
        """See `OtherPolicies.known`."""
        return [member.policy for member in self._joined.values()]

    def of(self, run: str) -> Policy:
        """See `OtherPolicies.of`."""
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
        """Follow while calls come; then leave."""
        following = asyncio.create_task(member.follow())
        loop = asyncio.get_running_loop()
        try:
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
        """Let go of a run: idle, closed, or failed in a way that nobody has thought of; its next call joins it anew."""
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
        """See `OtherPolicies.close`."""
        await end(*self._staying)
        await asyncio.sleep(0)  # the callbacks of the tasks run now
        await asyncio.gather(*self._leaving, return_exceptions=True)
