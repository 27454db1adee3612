"""The branches that a gateway answers, and the records of their parents, read once for all branches that come together.

The invariant: what is at hand is bounded. What is not at hand any more is read from the store again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from lightning.bounded import Bounded
from lightning.errors import DataError, StoreError
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import Claims
from lightning.store.protocol import Store
from lightning.types import ToolEvent
from lightning_record import exchanges

from lightning_branching.branched_attempt import BranchedAttempt, void
from lightning_branching.recorded import Prefix, RecordedRollout, edit_key, meant_changes, prefix_of, read_rollout

REMEMBERED: Final = 1024
"""Branches at work whose prefixes are at hand."""
PARENTS: Final = 8
"""Records of parents that are at hand: the branches of one come together."""
TOLD: Final = 4
"""Calls of its parent that the first calls of a branch are told against."""
SAID: Final = 4 * TOLD
"""Calls of each of these whose texts are at hand: groups that are sampled as trees branch at several calls at once."""


@runtime_checkable
class Inherits(Protocol):
    """The stage that keeps the texts of calls, as branches need it."""

    def inherit(self, attempt: tuple[str, int], calls: Sequence[exchanges.Said]) -> None:
        """An attempt of a branch begins: its texts may be told against these of its parent."""


@dataclass(slots=True)
class RecordedParent:
    """The record of a parent, and of its calls what those of branches are packed against. Both are forgotten together: a parent
    that is made again says something else."""

    recorded: RecordedRollout
    _said: Bounded[int, exchanges.Said] = field(default_factory=lambda: Bounded(SAID))

    def told_against(self, prefix: Prefix) -> list[exchanges.Said]:
        """What the calls of a branch are packed against to begin with: the call at which it branches, which its first call
        mostly asks again, and the last ones before that, as its parent's calls were. Its siblings get the same objects: to
        unpack a long rollout takes milliseconds of the event loop, and its requests may be megabytes."""
        last = sorted(prefix.answered, key=lambda call: call.transition.ended_at)[1 - TOLD :]
        numbers = [call.transition.seq for call in (prefix.at, *last)]
        said = {number: self._said[number] for number in numbers if number in self._said}
        if unknown := [number for number in numbers if number not in said]:
            calls = [call.transition for call in self.recorded.calls]
            said.update(zip(unknown, exchanges.said_in_parent(calls, unknown), strict=True))
        return [self._said.keep(number, said[number]) for number in numbers]


@dataclass(slots=True)
class Branches:
    """The branches that this gateway answers, by attempt."""

    store: Store
    texts: Inherits | None
    """The stage that keeps the texts of calls; None where none are kept."""
    _known: Bounded[tuple[str, int], BranchedAttempt] = field(default_factory=lambda: Bounded(REMEMBERED))
    _reading: dict[tuple[str, int], asyncio.Task[BranchedAttempt]] = field(default_factory=dict)
    _parents: Bounded[tuple[str, int], asyncio.Task[RecordedParent]] = field(default_factory=lambda: Bounded(PARENTS))

    async def of(self, claims: Claims) -> BranchedAttempt:
        """The branch of an attempt. Raises `RefusalError`: 409 where it is void from the beginning, 503 when the store cannot
        tell."""
        key = (claims.rollout, claims.attempt)
        if (known := self._known.used(key)) is not None:
            return known
        reading = self._reading.get(key)
        if reading is None:  # one reading for all calls that come at once: they share what is left of the prefix
            reading = self._reading[key] = asyncio.ensure_future(self._read(claims.rollout, claims.attempt))
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        try:
            return await asyncio.shield(reading)
        except DataError as error:
            raise void(str(error)) from error
        except StoreError as error:
            message = f"The store does not say what the branch begins with: {error}. Send the call again."
            raise RefusalError(503, "store_failed", message) from error

    async def keep_edit(self, branch: BranchedAttempt, claims: Claims) -> None:
        """The agent is about to get the edited answer: keep that, since it may make no call of its own after it. Raises
        `RefusalError` (409) where the store fails: the answer is given once, so that the branch is void."""
        try:
            await self.store.put_state(branch.run, edit_key(claims.rollout, claims.attempt), True, once=None)
        except StoreError as error:
            branch.refuse(f"the store does not keep that its edited answer was given: {error}")

    async def tool_runs(self, claims: Claims) -> list[ToolEvent]:
        """The runs of tools that are answered in a branch. Raises as `of` does."""
        return list((await self.of(claims)).prefix.tool_events)

    async def _read(self, name: str, number: int) -> BranchedAttempt:
        rollout = await self.store.get_rollout(name)
        if rollout is None or rollout.parent is None:
            raise DataError(f"the rollout {name} is no branch")
        parent, attempt, seq = rollout.parent
        found = await self._parent(parent, attempt)
        meant, prefix = await meant_changes(self.store, rollout), prefix_of(found.recorded, seq)
        if self.texts is not None:
            self.texts.inherit((name, number), found.told_against(prefix))
        branch = BranchedAttempt(prefix, (parent, attempt), rollout.run, meant)
        branch.goes_on(await self.store.transitions(name, number))
        # before the reading is over: whoever comes then must not read again
        return self._known.keep((name, number), branch)

    async def _parent(self, parent: str, attempt: int) -> RecordedParent:
        key = (parent, attempt)
        reading = self._parents.get(key)
        if reading is None:  # one reading for all branches that come at once: they share what it finds
            reading = self._parents.keep(key, asyncio.ensure_future(self._read_parent(parent, attempt)))
        try:
            return await asyncio.shield(reading)
        except BaseException:
            if self._parents.get(key) is reading:  # whoever comes next asks the store again
                del self._parents[key]
            raise

    async def _read_parent(self, parent: str, attempt: int) -> RecordedParent:
        return RecordedParent(await read_rollout(self.store, parent, attempt))
