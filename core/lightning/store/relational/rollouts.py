"""Creating, leasing and ending rollouts, and the names that an agent gives to its model calls at the end.

The invariant: of all processes on the database, one holds the running attempt of a rollout; each lease raises the attempt
number, so whoever held an earlier one is fenced off. Who ends, renews or writes into an attempt locks its rollout first. Labels
are written in the transaction that ends their attempt, to calls of that attempt only, and a row that was damaged before stays
recognizably damaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from lightning.errors import ConflictError, DataError, StaleAttemptError, StoreError
from lightning.store import codec, rollout_state, rows, sql
from lightning.store.protocol import KNOWN_SECONDS, Page, RolloutCount
from lightning.store.relational.transaction import Transaction, keep_answer, kept_answer
from lightning.store.rollout_state import Position
from lightning.store.rows import Row, Value
from lightning.types import Caller, Json, Lease, Rollout, Status


@dataclass(frozen=True, slots=True)
class Standing:
    """The row of a rollout, as far as writers need it. `parent` is the key of the call that it branches, as text, or empty."""

    n: int
    run: str
    group: str
    position: Position
    worker: str
    parent: str


async def standing(transaction: Transaction, rollout: str) -> Standing:
    """Find a rollout. Raises `StoreError` when nobody created it."""
    return _standing(rollout, await transaction.all(sql.SELECT_POSITION, (rollout,)))


async def held_standing(transaction: Transaction, rollout: str) -> Standing:
    """Find a rollout that is to stand so until the transaction ends. Raises `StoreError` when nobody created it."""
    return _standing(rollout, await transaction.locked(sql.SELECT_POSITION, (rollout,)))


def _standing(rollout: str, found: list[Row]) -> Standing:
    if not found:
        raise rollout_state.unknown_rollout(rollout)
    row = found[0]
    n, run, group, status, attempt, spent, max_attempts, worker, parent = row
    return Standing(n, run, group, Position(rollout, Status(status), attempt, spent, max_attempts), worker, parent)


async def create(transaction: Transaction, rollouts: Sequence[Rollout]) -> int:
    """See `Store.create_rollouts`."""
    values = [rows.rollout_values(rollout) for rollout in rollouts]
    runs = sorted({rollout.run for rollout in rollouts})
    # A page ends at an `n`, and what comes after it is read later: nobody may commit a smaller one then.
    await transaction.alone(*(f"rollouts {run}" for run in runs))
    new = await transaction.insert_new(sql.INSERT_ROLLOUT, values)
    if new < len(rollouts):
        for rollout in rollouts:
            await _check_owner(transaction, rollout)
    if new:
        for run in runs:
            await transaction.changed(run)
    return new


async def create_again(transaction: Transaction, new: int, rollouts: Sequence[Rollout]) -> int:
    """`create` after a try that found so many new and whose end nobody heard of: if none is new now, it was committed."""
    return await create(transaction, rollouts) or new


async def _check_owner(transaction: Transaction, rollout: Rollout) -> None:
    row = await transaction.one(sql.SELECT_OWNER, (rollout.id,))
    if row is not None and row[0] != rollout.run:
        raise ConflictError(
            f"rollout {rollout.id!r} cannot be created in run {rollout.run!r}: another run has one with this id. "
            "Begin the ids of rollouts with the id of their run"
        )


async def get(transaction: Transaction, rollout: str) -> Rollout | None:
    """See `Store.get_rollout`."""
    row = await transaction.one(sql.SELECT_ROLLOUT, (rollout,))
    return None if row is None else rows.ROLLOUTS.read(row)


async def page(
    transaction: Transaction,
    run: str,
    split: str | None,
    step: int | None,
    status: Status | None,
    cursor: str,
    limit: int,
) -> Page[Rollout]:
    """See `Store.list_rollouts`. The cursor is the `n` of the last rollout of the page before."""
    rollout_state.check_page(limit)
    if cursor and not cursor.isdecimal():
        raise rollout_state.no_cursor(cursor)
    asked = [value for value in (split, step, None if status is None else status.value) if value is not None]
    found = await transaction.all(
        sql.SELECT_ROLLOUTS
        + sql.page_conditions(split=split is not None, step=step is not None, status=status is not None)
        + sql.ORDER_PAGE,
        (run, int(cursor or 0), *asked, limit + 1),
    )
    rollouts = tuple(rows.ROLLOUTS.read(row[1:]) for row in found[:limit])
    return Page(rollouts, str(found[limit - 1][0]) if len(found) > limit else "")


async def count(transaction: Transaction, run: str) -> list[RolloutCount]:
    """See `Store.count_rollouts`."""
    found = await transaction.all(sql.COUNT_ROLLOUTS, (run,))
    return [RolloutCount(split, Status(status), number) for split, status, number in found]


async def lease(
    transaction: Transaction, run: str, worker: str, limit: int, ttl: float, known_as: str = ""
) -> list[Lease]:
    """See `Store.lease`; `known_as` is the name of the call (`rollout_state.known_as`)."""
    _check_ttl(ttl)
    if limit < 0:
        raise DataError(f"limit={limit} is negative: ask for the number of rollouts you can run now")
    if not worker:
        raise DataError("a lease needs the name of its worker: release() finds leases by it")
    if known_as and (leases := await _leased_before(transaction, known_as, worker, ttl)):
        return leases
    if known_as and not limit:
        return []
    now = await transaction.now()
    found = [] if not await transaction.one(sql.SELECT_LAPSED, (run, now)) else await _lapsed(transaction, run, limit)
    found += await transaction.free(sql.SELECT_PENDING, (run, limit))
    leases, taken, begun, expired = [], [], [], []
    for n, *row in sorted(found, key=lambda row: int(row[0]))[:limit]:
        before = rows.ROLLOUTS.read(tuple(row))
        if before.status is Status.RUNNING:
            expired.append((now, "expired", before.id, before.attempt))
        leases.append(Lease(rollout_state.leased(before), worker, now + ttl))
        taken.append((before.attempt + 1, worker, now + ttl, n))
        begun.append((before.id, before.attempt + 1, worker, now))
    if len(found) > limit:  # some were held for a moment and left: whoever found nothing meanwhile is to look again
        await transaction.changed(run)
    await transaction.many(sql.CLOSE_ATTEMPT, expired)
    await transaction.many(sql.TAKE_LEASE, taken)
    await transaction.many(sql.INSERT_ATTEMPT, begun)
    if known_as and leases:
        given: list[Json] = [[lease.rollout.id, lease.attempt] for lease in leases]
        await keep_answer(transaction, known_as, run, min(ttl, KNOWN_SECONDS), given)
    return leases


async def _leased_before(transaction: Transaction, known_as: str, worker: str, ttl: float) -> list[Lease]:
    """What the same call was given before its answer was lost and is still the worker's, for another `ttl` seconds."""
    await transaction.alone(f"call {known_as}")
    given = cast("list[tuple[str, int]]", await kept_answer(transaction, known_as) or [])
    # In the order of their ids, so that two that share rollouts do not wait for one another.
    standings = {rollout: await held_standing(transaction, rollout) for rollout, _ in sorted(given)}
    mine = [
        rollout
        for rollout, attempt in given
        if rollout_state.may_write(standings[rollout].position, attempt) and standings[rollout].worker == worker
    ]
    until = await transaction.now() + ttl
    await transaction.many(sql.RENEW_LEASE, [(until, rollout) for rollout in mine])
    found = [await get(transaction, rollout) for rollout in mine]
    return [Lease(rollout, worker, until) for rollout in found if rollout is not None]


async def _lapsed(transaction: Transaction, run: str, limit: int) -> list[Row]:
    """Fail those whose last allowed attempt was lost; return `limit` others whose lease expired."""
    now = await transaction.now()
    for n, rollout, worker, attempt in await transaction.free(sql.SELECT_EXHAUSTED, (run, now)):
        await transaction.run(sql.CLOSE_ATTEMPT, (now, "expired", rollout, attempt))
        await transaction.run(sql.FAIL_EXHAUSTED, (rollout_state.expired_error(worker, attempt), n))
        await transaction.changed(run)
    return await transaction.free(sql.SELECT_EXPIRED, (run, now, limit))


async def lease_again(
    transaction: Transaction, leases: list[Lease], run: str, worker: str, limit: int, ttl: float, known_as: str
) -> list[Lease]:
    """`lease` after a try that would have given `leases` and whose end nobody heard of: those, if it was committed."""
    for held in sorted(leases, key=lambda held: held.rollout.id):
        await held_standing(transaction, held.rollout.id)  # waits for the earlier try, should it still be on its way
        if await transaction.one(sql.SELECT_TAKEN, (held.rollout.id, held.attempt, held.worker, held.expires_at)):
            return leases
    return await lease(transaction, run, worker, limit, ttl, known_as)


async def renew(transaction: Transaction, lease: Lease, ttl: float) -> Lease:
    """See `Store.renew`."""
    _check_ttl(ttl)
    where = await held_standing(transaction, lease.rollout.id)
    rollout_state.check_fence(where.position, lease.attempt)
    if where.worker != lease.worker:
        raise StaleAttemptError(
            f"attempt {lease.attempt} of rollout {lease.rollout.id!r} is leased by {where.worker!r}, not by {lease.worker!r}"
        )
    until = await transaction.now() + ttl
    await transaction.run(sql.RENEW_LEASE, (until, lease.rollout.id))
    return Lease(lease.rollout, lease.worker, until)


async def complete(
    transaction: Transaction, rollout: str, attempt: int, end: rollout_state.Ending, *, spend: bool
) -> Rollout:
    """See `Store.complete`; `end` is the checked outcome."""
    where = await held_standing(transaction, rollout)
    if not rollout_state.may_write(where.position, attempt):
        earlier = await transaction.one(sql.SELECT_OUTCOME_DIGEST, (rollout, attempt))
        if earlier is None or earlier[0] != end.digest:
            rollout_state.check_fence(where.position, attempt)
    else:
        excused = rollout_state.is_excused(where.position, end, spend=spend)
        status = Status.PENDING if excused else rollout_state.after(where.position, end)
        await transaction.run(
            sql.END_ROLLOUT, (status.value, end.reward, end.rewards, end.fault, end.error, end.seconds, where.n)
        )
        if excused:
            await transaction.run(sql.GIVE_BACK, (where.n,))
        ending = end.fault or "reward"
        await transaction.run(
            sql.END_ATTEMPT,
            (
                await transaction.now(),
                ending,
                end.digest,
                end.tool_events,
                end.step_rewards,
                end.labels,
                end.step_states,
                end.extras,
                rollout,
                attempt,
            ),
        )
        await name_callers(transaction, where.n, rollout, attempt, rows.labels_from_text(end.labels))
        await transaction.changed(where.run)
    stored = await get(transaction, rollout)
    assert stored is not None, "the rollout was found in this transaction"
    return stored


async def release(transaction: Transaction, worker: str) -> int:
    """See `Store.release`."""
    held = await transaction.locked(sql.SELECT_HELD, (worker,))
    now = await transaction.now()
    await transaction.many(sql.CLOSE_ATTEMPT, [(now, "released", rollout, attempt) for _, rollout, attempt, _ in held])
    await transaction.many(sql.GIVE_BACK, [(n,) for n, *_ in held])
    for run in {run for *_, run in held}:
        await transaction.changed(run)
    return len(held)


def _check_ttl(ttl: float) -> None:
    if not (math.isfinite(ttl) and ttl >= 0):
        raise DataError(f"ttl={ttl!r} must be a number of seconds, 0 or more")


async def name_callers(
    transaction: Transaction, n: int, rollout: str, attempt: int, labels: Mapping[str, Caller]
) -> None:
    """Make `labels` the callers of the calls with these response ids. `n` is the row of the rollout."""
    if not labels:
        return
    changes: list[tuple[str, bytes, int]] = []
    place, call_id = rows.CALLS.fields.index("caller"), rows.CALLS.fields.index("id")
    for call, digest, head, *described in await transaction.all(sql.SELECT_HEADS, (codec.HEAD_BYTES, n, attempt)):
        caller = labels.get(described[call_id])
        if caller is None or not _is_intact(rollout, attempt, described, head, digest):
            continue
        described[place] = rows.nouns_to_text(caller, "a label")
        labelled = rollout_state.row_digest(rollout, attempt, described, codec.stored_digest(head))
        changes.append((described[place], labelled, call))
    await transaction.many(sql.NAME_CALLER, changes)


async def labels_of(transaction: Transaction, rollout: str, attempt: int) -> dict[str, Caller]:
    """The labels an attempt was completed with."""
    row = await transaction.one(sql.SELECT_LABELS, (rollout, attempt))
    return {} if row is None else rows.labels_from_text(row[0])


def _is_intact(rollout: str, attempt: int, described: Sequence[Value], head: bytes, digest: bytes) -> bool:
    """Whether a stored call is what was stored: a new digest would make a damaged row look whole."""
    try:
        return rollout_state.row_digest(rollout, attempt, described, codec.stored_digest(head)) == digest
    except (StoreError, ValueError, TypeError):
        return False
