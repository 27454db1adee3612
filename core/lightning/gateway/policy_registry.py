"""Whose policy a call is for: the gateway's own, or that of another run over the same store.

The invariant: a run's calls go to that run's policy servers and to no other's, whatever model they name. A run is joined when
its first key comes, and left when none has come for a while. How many models' names are remembered is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import PurePath

from lightning.addresses import Allowed
from lightning.asyncio_utils import end
from lightning.bounded import Once
from lightning.errors import StoreError
from lightning.gateway.fleet.member import Member
from lightning.gateway.fleet.records import now
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import ALIAS
from lightning.gateway.policy import Policy
from lightning.gateway.upstream.client import MODEL
from lightning.store.protocol import Store

log = logging.getLogger(__name__)

IDLE = 300.0
"""Seconds without a call after which a run of somebody else's is left."""


class Policies:
    """`own` is the policy of `run` (empty: of all), served by whoever made this gateway; None where it has only joined ones."""

    def __init__(
        self,
        store: Store,
        own: Policy | None,
        run: str,
        hold_timeout: float,
        clock: Callable[[], float] = now,
        allowed: Allowed | None = None,
    ) -> None:
        self._store, self._run, self._hold_timeout, self._clock = store, run, hold_timeout, clock
        self._allowed = allowed
        self.own = own
        self.asked = AskedModels(store)
        """The models that calls have asked for by name."""
        self._joined: dict[str, Member] = {}
        self._staying: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def known(self) -> list[Policy]:
        """The own policy and those of the runs that were joined."""
        return [*([self.own] if self.own else []), *(member.policy for member in self._joined.values())]

    def of(self, run: str) -> Policy:
        """The policy for keys of this run; of an unknown run, one whose calls wait until its trainer is found.

        Raises `RefusalError` (401) for a key that names no run where there is no policy of the gateway's own.
        """
        if self.own is not None and (not run or self._run in ("", run)):
            return self.own
        if not run:
            message = (
                "This server has no policy of its own, and the API key does not say which run it is of: get a new key."
            )
            raise RefusalError(401, "key_without_run", message)
        member = self._joined[run] if run in self._joined else self._join(run)
        member.policy.used = asyncio.get_running_loop().time()
        return member.policy

    def _join(self, run: str) -> Member:
        member = Member(self._store, run, self._hold_timeout, self._clock, self._allowed)
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
        """Leave every run."""
        await end(*self._staying)
        await asyncio.sleep(0)  # the callbacks of the tasks run now
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self.own is not None:
            await self.own.close()


NAMES = 256
"""Names that are looked at in all; agents choose them."""
LONGEST_NAME = 100
"""Characters of a name that are looked at."""


class AskedModels:
    """The models' names that agents ask for. Whatever the name, the run's policy answers: one that is not the policy's may be
    meant for another model, such as a judge in the reward, and is said in the log, once. A name changes nothing of its
    call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[tuple[str, str]] = set()
        self._limit = Once()

    async def look(self, run: str, policy: Policy, model: object) -> None:
        """Warn when a call asks for a model that is not called as the run's policy is; once for each run and name."""
        if not isinstance(model, str) or not model or model == MODEL or model.startswith(ALIAS):
            return
        name = model[:LONGEST_NAME]
        if (run, name) in self._seen:
            return
        if len(self._seen) >= NAMES:
            if self._limit.first():
                log.warning(
                    "agents have asked for %d models' names: from here on none is looked at, nor said here", NAMES
                )
            return
        self._seen.add((run, name))
        if any(slot.upstream.model == model for slot in policy.pool.slots) or await self._is_trained(run, model):
            return
        log.warning(
            "%r was asked for%s, and the policy answers, as it does under any name: such calls are recorded as the agent's "
            "own, and trained on where a trainer works. A judge or another model that is not to be trained needs a client "
            "with a base_url and an API key of its own, read before the rollout (in it OPENAI_BASE_URL and OPENAI_API_KEY "
            "are the policy's), or its name in the models of gateway.providers; or name its calls and leave that name out of "
            "train_agents (said once for each name)",
            name,
            f" in run {run}" if run else "",
        )

    async def _is_trained(self, run: str, model: str) -> bool:
        """Whether it is the model that the run was started with, by its whole name or the last part of it."""
        try:
            found = await self._store.get_run(run) if run else None
        except StoreError:
            return False
        name = str(found.config.get("model", "")) if found is not None else ""
        return model in (name, PurePath(name).name)
