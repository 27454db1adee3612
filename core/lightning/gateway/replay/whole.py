"""A rollout as its agent saw it: of a branch also the calls that were answered from its parent's record.

The invariant: the calls stand in the order in which the agent made them. Those that a branch inherits come before its own, with
the ids and the answers that it was given.
"""

from __future__ import annotations

from dataclasses import replace

from lightning.gateway.replay.branches import meant_changes
from lightning.gateway.replay.recorded import RecordedCall, RecordedRollout, edited, prefix_of, read_rollout
from lightning.store.protocol import Store


async def read_whole(
    store: Store, rollout: str, attempt: int | None = None, *, with_tools: bool = True
) -> RecordedRollout:
    """What the agent of a rollout asked and got, as `read_rollout` gives it. Tools that were answered in a branch are among its
    own already. Raises `DataError` for a rollout that cannot be replayed, or a branch whose parent cannot."""
    found = await store.get_rollout(rollout)
    if found is None or found.parent is None:
        return await read_rollout(store, rollout, attempt, with_tools=with_tools)
    own = await read_rollout(store, rollout, attempt, with_tools=with_tools, may_be_empty=True)
    parent, parents_attempt, seq = found.parent
    prefix = prefix_of(await read_rollout(store, parent, parents_attempt, with_tools=False), seq)
    calls: list[RecordedCall] = list(prefix.answered)
    if (edit := (await meant_changes(store, found)).edit) is not None:
        calls.append(edited(prefix.at, edit))
    calls += own.calls
    return replace(own, calls=tuple(replace(call, number=number) for number, call in enumerate(calls, 1)))
