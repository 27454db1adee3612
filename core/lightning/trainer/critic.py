"""The critic's values of a step, computed once and kept with the run.

The invariant: what a step was credited with is in the store before the step is committed, so a replay and an audit read the
values that were used instead of asking a critic that has learned since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lightning.batch.sample import FloatArray, Sample
from lightning.batch.states import StateValues, state_rows, with_values
from lightning.batch.trajectory import Group
from lightning.errors import StoreError
from lightning.store.protocol import Store


async def recorded_values(store: Store, run: str, step: int, groups: Sequence[Group]) -> list[Group]:
    """The groups with the values that the step was credited with. Raises `StoreError` when they are not there."""
    kept = await _read(store, run, step)
    if missing := _spans(state_rows(groups)) - kept.keys():
        rollout, attempt, seq = min(missing)
        raise StoreError(
            f"the critic's values of step {step} are not in the store (rollout {rollout} attempt {attempt} call {seq})"
        )
    return with_values(groups, kept)


async def fresh_values(
    store: Store,
    run: str,
    step: int,
    groups: Sequence[Group],
    values: Callable[[Sequence[Sample]], list[FloatArray]],
) -> list[Group]:
    """The groups with the critic's present values, which are recorded first; `values` is the engine's."""
    rows = state_rows(groups)
    given = await asyncio.to_thread(values, rows) if rows else []
    found = {
        (span.rollout, span.attempt, span.seq): float(value)
        for row, own in zip(rows, given, strict=True)
        for span, value in zip(row.spans, own, strict=True)
    }
    await store.put_state(run, _key(step), [[*key, value] for key, value in sorted(found.items())])
    return with_values(groups, found)


async def _read(store: Store, run: str, step: int) -> StateValues:
    kept = await store.get_state(run, _key(step))
    if not isinstance(kept, list):
        return {}
    return {(str(rollout), int(attempt), int(seq)): float(value) for rollout, attempt, seq, value in kept}


def _spans(rows: Sequence[Sample]) -> set[tuple[str, int, int]]:
    return {(span.rollout, span.attempt, span.seq) for row in rows for span in row.spans}


def _key(step: int) -> str:
    return f"values/{step}"
