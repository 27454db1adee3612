"""Runs, committed steps, metrics, events and small state.

The invariant: a step and the marks of the rollouts it trained are written together or not at all, and a rollout is marked once:
with its first step. It enters another one only where that declares it, and only so often (`rollout_state.Reuse`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning.errors import ConflictError, StaleAttemptError, StoreError
from lightning.store import rollout_state, rows, sql
from lightning.store.protocol import Attempt, MetricPoint
from lightning.store.relational.transaction import Transaction
from lightning.store.rows import Row, Value
from lightning.types import Json, Run, StepRecord

IDS_AT_ONCE: Final = 500
"""Ids in one statement at most."""


async def put_run(transaction: Transaction, run: Run) -> Run:
    """See `Store.put_run`. A run without a time of its own is created now."""
    created = replace(run, created_at=run.created_at or await transaction.now())
    await transaction.run(sql.INSERT_RUN, rows.RUNS.values(created))
    stored = await get_run(transaction, run.id)
    assert stored is not None, "the run was inserted in this transaction or before"
    return stored


async def get_run(transaction: Transaction, run: str) -> Run | None:
    """See `Store.get_run`."""
    row = await transaction.one(sql.SELECT_RUN, (run,))
    return None if row is None else rows.RUNS.read(row)


async def list_runs(
    transaction: Transaction, project: str | None, after: str, limit: int | None, brief: bool
) -> list[Run]:
    """See `Store.list_runs`."""
    rollout_state.check_page(limit)
    values: list[Value] = [] if project is None else [project]
    if after:
        place = await transaction.one(sql.SELECT_RUN_PLACE, (after,))
        if place is None or project not in (None, place[2]):
            raise rollout_state.no_cursor(after)
        values += place[:2]
    query = sql.select_runs(project=project is not None, after=bool(after), limit=limit is not None, brief=brief)
    found = await transaction.all(query, values if limit is None else [*values, limit])
    return [rows.RUNS.read(row) for row in found]


async def attempts_of(transaction: Transaction, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
    """See `Store.attempts_of`."""
    found: list[Attempt] = []
    for start in range(0, len(attempts), IDS_AT_ONCE):
        asked = attempts[start : start + IDS_AT_ONCE]
        names = list(dict.fromkeys(rollout for rollout, _ in asked))
        places = sql.places(len(names))
        current: dict[str, int] = {row[0]: row[1] for row in await transaction.all(sql.SELECT_CURRENT + places, names)}
        kept = {(row[0], row[1]): row for row in await transaction.all(sql.SELECT_ATTEMPTS + places, names)}
        for rollout, attempt in asked:
            if rollout not in current:
                raise rollout_state.unknown_rollout(rollout)
            number = current[rollout] if attempt is None else attempt
            row = kept.get((rollout, number))
            found.append(Attempt(rollout, number) if row is None else rows.ATTEMPTS.read(row))
    return found


async def commit_step(transaction: Transaction, record: StepRecord) -> None:
    """See `Store.commit_step`. A record without a time of its own is committed now."""
    await transaction.alone(f"steps {record.run}")
    earlier = await transaction.one(sql.SELECT_STEP_DIGEST, (record.run, record.step))
    if earlier is not None:
        if earlier[0] != record.digest:
            raise ConflictError(
                f"step {record.step} of run {record.run!r} is committed already with another batch (digest {earlier[0]!r}, "
                f"not {record.digest!r}): is another trainer working on this run?"
            )
        return
    trained, reuse, first = sorted(record.rollouts), rollout_state.reuse_of(record), record.step
    for (rollout, _), (following, _) in itertools.pairwise(trained):
        if rollout == following:
            raise rollout_state.named_twice(record, rollout)
    for start in range(0, len(trained), IDS_AT_ONCE):
        some = trained[start : start + IDS_AT_ONCE]
        names = [rollout for rollout, _ in some]
        locked = await transaction.locked(sql.SELECT_TRAINABLE + sql.places(len(names)) + sql.ORDER_IDS, names)
        standing = {row[0]: row[1:] for row in locked}
        for rollout, attempt in some:
            first = min(first, _check_trainable(record, rollout, attempt, standing.get(rollout), reuse))
        if new := [name for name in names if name not in reuse.rollouts]:
            await transaction.run(sql.MARK_TRAINED + sql.places(len(new)), (record.step, *new))
    await _check_uses(transaction, record, reuse, first)
    committed = replace(record, at=record.at or await transaction.now())
    await transaction.run(sql.INSERT_STEP, rows.STEPS.values(committed))
    await transaction.changed(record.run)


def _check_trainable(
    record: StepRecord, rollout: str, attempt: int, found: Row | None, reuse: rollout_state.Reuse
) -> int:
    """The first step that trained it, this one or the one before that a reuse is of."""
    if found is None:
        raise rollout_state.unknown_rollout(rollout)
    run, status, fault, current, trained = found
    what = f"step {record.step} of run {record.run!r} cannot train rollout {rollout!r}"
    if run != record.run:
        raise StoreError(f"{what}: it belongs to run {run!r}")
    if not rollout_state.may_train(status, fault) or current != attempt:
        raise StaleAttemptError(f"{what} by attempt {attempt}: it is {status} at attempt {current}")
    declared = rollout in reuse.rollouts
    if declared != (trained is not None and trained < record.step) or (not declared and trained is not None):
        raise rollout_state.not_new(record, rollout, trained, declared=declared)
    return trained if declared else record.step


async def _check_uses(transaction: Transaction, record: StepRecord, reuse: rollout_state.Reuse, first: int) -> None:
    """Refuse a reuse beyond its limit. Steps before `first` trained none of what is reused."""
    if not reuse.rollouts:
        return
    uses = Counter[str]()
    for (text,) in await transaction.all(sql.SELECT_TRAINED, (record.run, first)):
        uses.update(name for name, _ in json.loads(text) if name in reuse.rollouts)
    for rollout, steps in sorted(uses.items()):
        if steps > reuse.limit:
            raise rollout_state.used_up(record, rollout, steps, reuse.limit)


async def steps(transaction: Transaction, run: str, after: int, limit: int | None, brief: bool) -> list[StepRecord]:
    """See `Store.steps`."""
    rollout_state.check_page(limit)
    query = sql.select_steps(limit=limit is not None, brief=brief)
    found = await transaction.all(query, (run, after) if limit is None else (run, after, limit))
    return [rows.STEPS.read(row) for row in found]


async def last_step(transaction: Transaction, run: str) -> StepRecord | None:
    """See `Store.last_step`."""
    row = await transaction.one(sql.SELECT_LAST_STEP, (run,))
    return None if row is None else rows.STEPS.read(row)


async def log_metrics(transaction: Transaction, run: str, step: int, values: Mapping[str, float]) -> None:
    """See `Store.log_metrics`."""
    now = await transaction.now()
    await transaction.many(
        sql.UPSERT_METRIC, [(run, step, name, float(value), now) for name, value in sorted(values.items())]
    )


async def metrics(transaction: Transaction, run: str) -> list[MetricPoint]:
    """See `Store.metrics`."""
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for step, name, value, at in await transaction.all(sql.SELECT_METRICS, (run,)):
        steps.setdefault(step, {})[name] = math.nan if value is None else value
        times[step] = max(at, times.get(step, at))
    return [MetricPoint(step, values, times[step]) for step, values in steps.items()]


async def put_state(transaction: Transaction, run: str, key: str, text: str) -> None:
    """See `Store.put_state`; `text` is the value as JSON."""
    await transaction.run(sql.UPSERT_STATE, (run, key, text))
    await transaction.changed(run)


async def keep_state(transaction: Transaction, run: str, key: str, text: str) -> Json:
    """See `Store.keep_state`; `text` is the value as JSON."""
    if await transaction.run(sql.KEEP_STATE, (run, key, text)):
        await transaction.changed(run)
    return await get_state(transaction, run, key)


async def get_state(transaction: Transaction, run: str, key: str) -> Json:
    """See `Store.get_state`."""
    row = await transaction.one(sql.SELECT_STATE, (run, key))
    return None if row is None else rows.load(row[0], f"the state {key!r} of run {run!r}")
