"""A rollout as it was recorded: what its agent sent and got in each call, and how its tools fared.

The invariant: a rollout whose record is not whole is refused with the reason, never replayed in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning.errors import DataError
from lightning.store import exchanges
from lightning.store.exchanges import Exchange, Parent, parents_of
from lightning.store.protocol import Store
from lightning.types import CallStatus, Rollout, StepReward, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One model call. `number` counts the calls of the rollout from 1, in the order in which they began."""

    number: int
    transition: Transition
    exchange: Exchange

    @property
    def caller(self) -> str:
        """The path of who made it."""
        return self.transition.caller.name

    @property
    def key(self) -> tuple[str, bytes]:
        """What a request is looked up by: the API, and the canonical JSON of what was asked."""
        body = self.exchange.request
        return self.exchange.path, exchanges.canonical(body) if isinstance(body, dict) else b""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout of one attempt. `refusals` are calls that were refused before their request was recorded. `has_outcome` says
    that the outcome in `rollout` is this attempt's: of an earlier one it is not kept."""

    rollout: Rollout
    calls: tuple[RecordedCall, ...]
    refusals: tuple[Transition, ...]
    tool_events: tuple[ToolEvent, ...]
    step_rewards: tuple[StepReward, ...] = ()
    has_outcome: bool = True


class RecordedCalls:
    """The recorded calls that have not been asked for yet: each is given once, equal ones in their order."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        self._left: dict[tuple[str, bytes], list[RecordedCall]] = {}
        for call in calls:
            self._left.setdefault(call.key, []).append(call)

    def take(self, caller: str, path: str, request: bytes) -> RecordedCall | None:
        """The recorded call of this request: of the same caller if there is one, else the first; None without one."""
        same = self._left.get((path, request))
        if not same:
            return None
        found = next((call for call in same if call.caller == caller), same[0])
        same.remove(found)
        if not same:
            del self._left[path, request]
        return found

    @property
    def left(self) -> list[RecordedCall]:
        """Those that have not been asked for, in their order."""
        return sorted((call for calls in self._left.values() for call in calls), key=lambda call: call.number)


async def read_rollout(
    store: Store, rollout: str, attempt: int | None = None, *, with_tools: bool = True, may_be_empty: bool = False
) -> RecordedRollout:
    """What is recorded of a rollout; of a branch its own calls (`lightning.gateway.replay.whole` knows all of them).

    `attempt` None is the current one; `with_tools` says that its tools are to be answered as well, `may_be_empty` that it may
    have no call. Raises `DataError` for one that is not there or cannot be replayed, `ParentGoneError` for a branch whose
    parent was removed or made again.
    """
    found = await store.get_rollout(rollout)
    if found is None:
        raise DataError(f"there is no rollout {rollout!r} in this store")
    number = found.attempt if attempt is None else attempt
    if not 0 < number <= found.attempt:
        raise DataError(f"the rollout {rollout} has {found.attempt} attempts, so there is no attempt {number}")
    transitions = await store.transitions(rollout, number)
    (ended,) = await store.attempts_of([(rollout, number)])
    (parent,) = await parents_of(store, [found])
    made = recorded_rollout(
        replace(found, attempt=number),
        transitions,
        ended.tool_events,
        ended.step_rewards,
        parent=parent,
        with_tools=with_tools,
        may_be_empty=may_be_empty,
    )
    return made if number == found.attempt else replace(made, has_outcome=False)


def recorded_rollout(
    rollout: Rollout,
    transitions: Sequence[Transition],
    tool_events: Sequence[ToolEvent] = (),
    step_rewards: Sequence[StepReward] = (),
    *,
    parent: Parent | None = None,
    with_tools: bool = True,
    may_be_empty: bool = False,
) -> RecordedRollout:
    """The record of an attempt, from its rows; of a branch also from those of its `parent`. Raises `DataError` for one that
    cannot be replayed, `StoreError` for rows that cannot be read."""
    if not transitions and not may_be_empty:
        raise DataError(
            f"no call of the rollout {rollout.id} is stored: it made none, or `lightning db prune` removed them"
        )
    if why := exchanges.why_not_replayable(transitions, tool_events if with_tools else ()):
        raise DataError(f"the rollout {rollout.id} cannot be replayed: {why}")
    calls: list[RecordedCall] = []
    refusals = []
    for transition, exchange in zip(transitions, exchanges.read(transitions, parent), strict=True):
        if transition.choice:
            continue
        if exchange is not None:
            calls.append(RecordedCall(len(calls) + 1, transition, exchange))
        elif transition.status is CallStatus.REFUSED:
            refusals.append(transition)
    return RecordedRollout(rollout, tuple(calls), tuple(refusals), tuple(tool_events), tuple(step_rewards))
