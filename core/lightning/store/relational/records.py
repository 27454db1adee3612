"""Runs, committed steps, metrics, events and small state.

The invariant: a step and the marks of the rollouts it trained are written together or not at all, and a rollout is marked once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lightning.errors import ConflictError, StaleAttemptError, StoreError
from lightning.store import json_text, rows, rules, sql
from lightning.store.protocol import MetricPoint
from lightning.store.relational.rollouts import standing
from lightning.store.relational.transaction import Transaction
from lightning.store.rows import Value
from lightning.types import Json, Run, Status, StepRecord, StepReward, ToolEvent


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
    rules.check_page(limit)
    values: list[Value] = [] if project is None else [project]
    if after:
        place = await transaction.one(sql.SELECT_RUN_PLACE, (after,))
        if place is None or project not in (None, place[2]):
            raise rules.no_cursor(after)
        values += place[:2]
    query = sql.select_runs(project=project is not None, after=bool(after), limit=limit is not None, brief=brief)
    found = await transaction.all(query, values if limit is None else [*values, limit])
    return [rows.RUNS.read(row) for row in found]


async def tool_events(transaction: Transaction, rollout: str, attempt: int | None) -> list[ToolEvent]:
    """See `Store.tool_events`."""
    text = await _of_attempt(transaction, sql.SELECT_TOOL_EVENTS, rollout, attempt)
    return json_text.tool_events_from_text(text)


async def step_rewards(transaction: Transaction, rollout: str, attempt: int | None) -> list[StepReward]:
    """See `Store.step_rewards`."""
    text = await _of_attempt(transaction, sql.SELECT_STEP_REWARDS, rollout, attempt)
    return json_text.step_rewards_from_text(text)


async def _of_attempt(transaction: Transaction, query: str, rollout: str, attempt: int | None) -> str:
    current = (await standing(transaction, rollout)).position.attempt
    row = await transaction.one(query, (rollout, current if attempt is None else attempt))
    return "[]" if row is None else str(row[0])


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
    # In the order of their ids, so that two that share rollouts do not wait for one another.
    for rollout, attempt in sorted(record.rollouts):
        await _check_trainable(transaction, record, rollout, attempt)
        await transaction.run(sql.MARK_TRAINED, (record.step, rollout))
    committed = replace(record, at=record.at or await transaction.now())
    await transaction.run(sql.INSERT_STEP, rows.STEPS.values(committed))
    await transaction.changed(record.run)


async def _check_trainable(transaction: Transaction, record: StepRecord, rollout: str, attempt: int) -> None:
    found = await transaction.locked(sql.SELECT_TRAINABLE, (rollout,))
    if not found:
        raise rules.unknown_rollout(rollout)
    run, status, current, trained = found[0]
    what = f"step {record.step} of run {record.run!r} cannot train rollout {rollout!r}"
    if run != record.run:
        raise StoreError(f"{what}: it belongs to run {run!r}")
    if status != Status.SUCCEEDED or current != attempt:
        raise StaleAttemptError(f"{what} by attempt {attempt}: it is {status} at attempt {current}")
    if trained is not None:
        raise ConflictError(f"{what}: step {trained} trained it already, and a rollout enters exactly one step")


async def list_steps(transaction: Transaction, run: str) -> list[StepRecord]:
    """See `Store.list_steps`."""
    return [rows.STEPS.read(row) for row in await transaction.all(sql.SELECT_STEPS, (run,))]


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
    return None if row is None else json_text.load(row[0], f"the state {key!r} of run {run!r}")
