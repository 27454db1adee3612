"""Runs, committed steps, metrics, events and small state.

The invariant: a step and the marks of the rollouts it trained are written together or not at all, and a rollout is marked once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning.errors import ConflictError, StaleAttemptError, StoreError
from lightning.store import rows, rules, sql
from lightning.store.protocol import MetricPoint
from lightning.store.sqlite.connection import Transaction
from lightning.store.sqlite.rollouts import standing
from lightning.types import Json, Run, Status, StepRecord, StepReward, ToolEvent


def put_run(transaction: Transaction, run: Run) -> Run:
    """See `Store.put_run`. A run without a time of its own is created now."""
    config = rows.dump(dict(run.config), f"the configuration of run {run.id!r}")
    transaction.run(sql.INSERT_RUN, (run.id, run.name, config, run.created_at or transaction.now, run.project))
    stored = get_run(transaction, run.id)
    assert stored is not None, "the run was inserted in this transaction or before"
    return stored


def get_run(transaction: Transaction, run: str) -> Run | None:
    """See `Store.get_run`."""
    row = transaction.one(sql.SELECT_RUN, (run,))
    return None if row is None else rows.run_from_row(row)


def list_runs(transaction: Transaction, project: str | None) -> list[Run]:
    """See `Store.list_runs`."""
    found = (
        transaction.all(sql.SELECT_RUNS) if project is None else transaction.all(sql.SELECT_PROJECT_RUNS, (project,))
    )
    return [rows.run_from_row(row) for row in found]


def tool_events(transaction: Transaction, rollout: str, attempt: int | None) -> list[ToolEvent]:
    """See `Store.tool_events`."""
    text = _of_attempt(transaction, sql.SELECT_TOOL_EVENTS, rollout, attempt)
    return rows.tool_events_from_text(text)


def step_rewards(transaction: Transaction, rollout: str, attempt: int | None) -> list[StepReward]:
    """See `Store.step_rewards`."""
    text = _of_attempt(transaction, sql.SELECT_STEP_REWARDS, rollout, attempt)
    return rows.step_rewards_from_text(text)


def _of_attempt(transaction: Transaction, query: str, rollout: str, attempt: int | None) -> str:
    current = standing(transaction, rollout).position.attempt
    row = transaction.one(query, (rollout, current if attempt is None else attempt))
    return "[]" if row is None else str(row[0])


def commit_step(transaction: Transaction, record: StepRecord) -> None:
    """See `Store.commit_step`. A record without a time of its own is committed now."""
    earlier = transaction.one(sql.SELECT_STEP_DIGEST, (record.run, record.step))
    if earlier is not None:
        if earlier[0] != record.digest:
            raise ConflictError(
                f"step {record.step} of run {record.run!r} is committed already with another batch (digest {earlier[0]!r}, "
                f"not {record.digest!r}): is another trainer working on this run?"
            )
        return
    for rollout, attempt in record.rollouts:
        _check_trainable(transaction, record, rollout, attempt)
        transaction.run(sql.MARK_TRAINED, (record.step, rollout))
    transaction.run(sql.INSERT_STEP, (*rows.step_values(record), record.at or transaction.now))
    transaction.changed(record.run)


def _check_trainable(transaction: Transaction, record: StepRecord, rollout: str, attempt: int) -> None:
    row = transaction.one(sql.SELECT_TRAINABLE, (rollout,))
    if row is None:
        raise rules.unknown_rollout(rollout)
    run, status, current, trained = row
    what = f"step {record.step} of run {record.run!r} cannot train rollout {rollout!r}"
    if run != record.run:
        raise StoreError(f"{what}: it belongs to run {run!r}")
    if status != Status.SUCCEEDED or current != attempt:
        raise StaleAttemptError(f"{what} by attempt {attempt}: it is {status} at attempt {current}")
    if trained is not None:
        raise ConflictError(f"{what}: step {trained} trained it already, and a rollout enters exactly one step")


def list_steps(transaction: Transaction, run: str) -> list[StepRecord]:
    """See `Store.list_steps`."""
    return [rows.step_from_row(row) for row in transaction.all(sql.SELECT_STEPS, (run,))]


def log_metrics(transaction: Transaction, run: str, step: int, values: Mapping[str, float]) -> None:
    """See `Store.log_metrics`."""
    now = transaction.now
    transaction.many(sql.UPSERT_METRIC, [(run, step, name, float(value), now) for name, value in values.items()])


def metrics(transaction: Transaction, run: str) -> list[MetricPoint]:
    """See `Store.metrics`."""
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for step, name, value, at in transaction.all(sql.SELECT_METRICS, (run,)):
        steps.setdefault(step, {})[name] = math.nan if value is None else value
        times[step] = max(at, times.get(step, at))
    return [MetricPoint(step, values, times[step]) for step, values in steps.items()]


def put_state(transaction: Transaction, run: str, key: str, text: str) -> None:
    """See `Store.put_state`; `text` is the value as JSON."""
    transaction.run(sql.UPSERT_STATE, (run, key, text))
    transaction.changed(run)


def keep_state(transaction: Transaction, run: str, key: str, text: str) -> Json:
    """See `Store.keep_state`; `text` is the value as JSON."""
    if transaction.run(sql.KEEP_STATE, (run, key, text)):
        transaction.changed(run)
    return get_state(transaction, run, key)


def revision(transaction: Transaction, run: str) -> int:
    """How often the run has changed."""
    row = transaction.one(sql.SELECT_REVISION, (run,))
    return int(row[0]) if row else 0


def get_state(transaction: Transaction, run: str, key: str) -> Json:
    """See `Store.get_state`."""
    row = transaction.one(sql.SELECT_STATE, (run, key))
    return None if row is None else rows.load(row[0], f"the state {key!r} of run {run!r}")
