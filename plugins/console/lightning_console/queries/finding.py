"""Finds the rollouts that an address means.

The invariant: what belongs to another run is not there, whatever its id.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning.errors import DataError
from lightning.store.pages import each_rollout
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.epochs import is_over
from lightning.types import Rollout, StepRecord

from lightning_console.places import Located

LOOKED: Final = 20_000
"""Rollouts among which a group of an unusual name is looked for."""


async def rollout_of(located: Located, rollout: str) -> Rollout:
    """A rollout of a run. Raises `DataError` where the run has none of that id."""
    found = await located.store.get_rollout(rollout)
    if found is None or found.run != located.run.id:
        raise DataError(f"the run {located.run.id} has no rollout {rollout[:200]!r}")
    return found


async def group_of(located: Located, group: str, member: Rollout | None = None) -> list[Rollout]:
    """The rollouts of a group, in their order in it; where one `member` of it is known, only its step is read. Raises
    `DataError` where the run has none of that id."""
    store, run = located.store, located.run.id
    first = member or await _first_of(store, run, group)
    same = each_rollout(store, run, split=first.split, step=first.step)
    return sorted([each async for each in same if each.group == group], key=lambda each: each.index)


async def _first_of(store: Store, run: str, group: str) -> Rollout:
    """A rollout of a group. One that does not have the name that the trainer gives is looked for among the first of the run."""
    for name in (f"{group}/0", group):
        found = await store.get_rollout(name)
        if found is not None and found.run == run and found.group == group:
            return found
    looked = 0
    async for each in each_rollout(store, run):
        looked += 1
        if each.group == group:
            return each
        if looked >= LOOKED:
            raise DataError(
                f"the group {group[:200]!r} is not among the first {LOOKED} rollouts of the run {run}: open it from the page "
                "of one of its rollouts"
            )
    raise DataError(f"the run {run} has no group {group[:200]!r}")


async def neighbours(
    located: Located, rollout: Rollout, record: StepRecord | None
) -> tuple[list[str], tuple[Rollout, ...]]:
    """The groups beside that of a rollout, in the order of the step that looked at them, else as they were planned."""
    if record is not None and rollout.group in record.groups:
        return list(record.groups), ()
    page = await located.store.list_rollouts(located.run.id, split=rollout.split, step=rollout.step)
    return list(dict.fromkeys(each.group for each in page.items)), page.items


async def why_no_calls(store: Store, rollout: Rollout) -> str:
    """Why no call of a rollout is stored, in words."""
    if not rollout.attempt:
        return "it has not begun yet"
    if not rollout.status.ended:
        return "it has made no call yet"
    if await store.get_state(rollout.run, PRUNED):
        return "no call of it is stored: it made none, or `lightning db prune` removed them, as it did from this run"
    return "it made no model call"


async def may_change(store: Store, rollouts: list[Rollout]) -> bool:
    """Whether rollouts, or what training made of them, may still change."""
    if all(each.status.ended for each in rollouts) and (
        rollouts[0].split != "train" or any(each.trained_at_step is not None for each in rollouts)
    ):
        return False
    return not await is_over(store, rollouts[0].run)


def at_attempt(rollout: Rollout, attempt: int) -> Rollout:
    """A rollout as one of its attempts. Raises `DataError` for one that there was not."""
    if not 0 < attempt <= rollout.attempt:
        raise DataError(f"the rollout {rollout.id} has {rollout.attempt} attempts, so there is no attempt {attempt}")
    return replace(rollout, attempt=attempt)
