"""Creating, leasing and ending rollouts.

The invariant: of all processes on the file, one holds the running attempt of a rollout; each lease raises the attempt number,
so whoever held an earlier one is fenced off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.errors import ConflictError, DataError, StaleAttemptError
from lightning.store import rows, rules, sql
from lightning.store.protocol import Page
from lightning.store.rules import Position
from lightning.store.sqlite.connection import Transaction
from lightning.store.sqlite.labels import name_callers
from lightning.types import Lease, Rollout, Status


@dataclass(frozen=True, slots=True)
class Standing:
    """The row of a rollout, as far as writers need it."""

    n: int
    run: str
    group: str
    position: Position
    worker: str


def standing(transaction: Transaction, rollout: str) -> Standing:
    """Find a rollout. Raises `StoreError` when nobody created it."""
    row = transaction.one(sql.SELECT_POSITION, (rollout,))
    if row is None:
        raise rules.unknown_rollout(rollout)
    n, run, group, status, attempt, spent, max_attempts, worker = row
    return Standing(n, run, group, Position(rollout, Status(status), attempt, spent, max_attempts), worker)


def create(transaction: Transaction, rollouts: Sequence[Rollout]) -> int:
    """See `Store.create_rollouts`."""
    values = [rows.rollout_values(rollout) for rollout in rollouts]
    new = transaction.many(sql.INSERT_ROLLOUT, values)
    if new < len(rollouts):
        for rollout in rollouts:
            _check_owner(transaction, rollout)
    if new:
        for run in {rollout.run for rollout in rollouts}:
            transaction.changed(run)
    return new


def _check_owner(transaction: Transaction, rollout: Rollout) -> None:
    row = transaction.one(sql.SELECT_OWNER, (rollout.id,))
    if row is not None and row[0] != rollout.run:
        raise ConflictError(
            f"rollout {rollout.id!r} cannot be created in run {rollout.run!r}: another run has one with this id. "
            "Begin the ids of rollouts with the id of their run"
        )


def get(transaction: Transaction, rollout: str) -> Rollout | None:
    """See `Store.get_rollout`."""
    row = transaction.one(sql.SELECT_ROLLOUT, (rollout,))
    return None if row is None else rows.rollout_from_row(row)


def page(
    transaction: Transaction,
    run: str,
    split: str | None,
    step: int | None,
    status: Status | None,
    cursor: str,
    limit: int,
) -> Page:
    """See `Store.list_rollouts`. The cursor is the `n` of the last rollout of the page before."""
    if limit < 1:
        raise DataError(f"limit={limit} asks for an empty page: it must be at least 1")
    if cursor and not cursor.isdecimal():
        raise DataError(f"{cursor!r} is not a cursor: pass the `cursor` of the page before, or nothing")
    asked = [value for value in (split, step, None if status is None else status.value) if value is not None]
    found = transaction.all(
        sql.SELECT_ROLLOUTS
        + sql.page_conditions(split=split is not None, step=step is not None, status=status is not None)
        + sql.ORDER_PAGE,
        (run, int(cursor or 0), *asked, limit + 1),
    )
    rollouts = tuple(rows.rollout_from_row(row[1:]) for row in found[:limit])
    return Page(rollouts, str(found[limit - 1][0]) if len(found) > limit else "")


def lease(transaction: Transaction, run: str, worker: str, limit: int, ttl: float) -> list[Lease]:
    """See `Store.lease`."""
    _check_ttl(ttl)
    if limit < 0:
        raise DataError(f"limit={limit} is negative: ask for the number of rollouts you can run now")
    if not worker:
        raise DataError("a lease needs the name of its worker: release() finds leases by it")
    _fail_exhausted(transaction, run)
    now = transaction.now
    found = transaction.all(sql.SELECT_LEASABLE, (run, limit, run, now, limit, limit))
    leases, taken, begun, expired = [], [], [], []
    for n, *row in found:
        before = rows.rollout_from_row(tuple(row))
        if before.status is Status.RUNNING:
            expired.append((now, "expired", before.id, before.attempt))
        leases.append(Lease(rules.leased(before), worker, now + ttl))
        taken.append((before.attempt + 1, worker, now + ttl, n))
        begun.append((before.id, before.attempt + 1, worker, now))
    transaction.many(sql.CLOSE_ATTEMPT, expired)
    transaction.many(sql.TAKE_LEASE, taken)
    transaction.many(sql.INSERT_ATTEMPT, begun)
    return leases


def _fail_exhausted(transaction: Transaction, run: str) -> None:
    for n, rollout, worker, attempt in transaction.all(sql.SELECT_EXHAUSTED, (run, transaction.now)):
        transaction.run(sql.CLOSE_ATTEMPT, (transaction.now, "expired", rollout, attempt))
        transaction.run(sql.FAIL_EXHAUSTED, (rules.expired_error(worker, attempt), n))
        transaction.changed(run)


def renew(transaction: Transaction, held: Lease, ttl: float) -> Lease:
    """See `Store.renew`."""
    _check_ttl(ttl)
    where = standing(transaction, held.rollout.id)
    rules.check_fence(where.position, held.attempt)
    if where.worker != held.worker:
        raise StaleAttemptError(
            f"attempt {held.attempt} of rollout {held.rollout.id!r} is leased by {where.worker!r}, not by {held.worker!r}"
        )
    until = transaction.now + ttl
    transaction.run(sql.RENEW_LEASE, (until, held.rollout.id))
    return Lease(held.rollout, held.worker, until)


def complete(transaction: Transaction, rollout: str, attempt: int, end: rules.Ending) -> Rollout:
    """See `Store.complete`; `end` is the checked outcome."""
    where = standing(transaction, rollout)
    earlier = transaction.one(sql.SELECT_OUTCOME_DIGEST, (rollout, attempt))
    if earlier is None or earlier[0] != end.digest:
        rules.check_fence(where.position, attempt)
        status = rules.after(where.position, end)
        transaction.run(
            sql.END_ROLLOUT, (status.value, end.reward, end.rewards, end.fault, end.error, end.seconds, where.n)
        )
        ending = end.fault or "reward"
        transaction.run(
            sql.END_ATTEMPT,
            (transaction.now, ending, end.digest, end.tool_events, end.step_rewards, end.labels, rollout, attempt),
        )
        name_callers(transaction, where.n, rollout, attempt, rows.labels_from_text(end.labels))
        transaction.changed(where.run)
    stored = get(transaction, rollout)
    assert stored is not None, "the rollout was found in this transaction"
    return stored


def release(transaction: Transaction, worker: str) -> int:
    """See `Store.release`."""
    held = transaction.all(sql.SELECT_HELD, (worker,))
    now = transaction.now
    transaction.many(sql.CLOSE_ATTEMPT, [(now, "released", rollout, attempt) for _, rollout, attempt, _ in held])
    transaction.many(sql.GIVE_BACK, [(n,) for n, *_ in held])
    for run in {run for *_, run in held}:
        transaction.changed(run)
    return len(held)


def _check_ttl(ttl: float) -> None:
    if not (math.isfinite(ttl) and ttl >= 0):
        raise DataError(f"ttl={ttl!r} must be a number of seconds, 0 or more")
