"""The operations of a store as functions of a transaction: on runs, rollouts, model calls, ends of attempts, committed steps,
metrics and small state.

The invariant: of all processes on the database, one holds the running attempt of a rollout. Each lease raises the attempt
number, which fences off whoever held an earlier attempt. A transaction that ends, renews or writes into an attempt locks the
rollout first. The content of a call never changes, except that a call becomes aborted if its answer did not arrive. A call
that is read is checked against the digest written with it. Labels are kept with the end of their attempt, and name the callers
of its calls when the calls are read. A step and the marks of the rollouts it trained are written together or not at all. A
rollout is marked with the first step that trains it; a later step may train it again only if the step declares this, and only
as often as declared (`rollout_state.Reuse`).

Statements are in the dialect that SQLite and PostgreSQL share. A statement stands where it is run, unless it is run in several
places or has the columns of a noun. Parameters are `?`; a driver that numbers them (`$1`) rewrites them, so no literal contains
a question mark. Upserts are ON CONFLICT. The clock, the locking of rows (`relational.transaction`) and the types of the schema
(`schema`) belong to the store. "group" and "index" are reserved words, hence `group_id` and `idx`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final, cast

from lightning.errors import ConflictError, DataError, StoreError
from lightning.store import codec, rollout_state, rows
from lightning.store.codec import CANDIDATES, LOADED_CALLS, Decoder, Fingerprint, KnownTransition, Prompt, choose
from lightning.store.protocol import KNOWN_SECONDS, Attempt, MetricPoint, Page, RolloutCount
from lightning.store.relational.transaction import Transaction, keep_answer, kept_answers, once_only
from lightning.store.rollout_state import Position
from lightning.store.rows import Row
from lightning.types import Json, Lease, Rollout, Run, Status, StepRecord, Transition

IDS_AT_ONCE: Final = 500
"""The largest number of ids in one statement."""
ALL: Final = 2**63 - 1
"""The LIMIT of a list without one."""


def insert(table: str, columns: str, conflict: str = "") -> str:
    """Return a statement that inserts a row with these columns. With `conflict`, the columns of a key, the statement leaves out
    a row whose key exists."""
    places = ", ".join("?" for _ in columns.split(", "))
    left_out = f" ON CONFLICT ({conflict}) DO NOTHING" if conflict else ""
    return f"INSERT INTO {table} ({columns}) VALUES ({places}){left_out}"  # noqa: S608


INSERT_RUN: Final = insert("runs", rows.RUNS.names(), "id")
INSERT_ROLLOUT: Final = insert("rollouts", rows.ROLLOUTS.names(without=rows.EARNED), "id")
INSERT_ATTEMPT: Final = insert("attempts", "rollout, attempt, worker, leased_at")
INSERT_TRANSITION: Final = insert(
    "transitions", f"rollout, attempt, parent, {rows.CALLS.names()}, digest, tokens", "rollout, attempt, seq"
)
INSERT_STEP: Final = insert("steps", rows.STEPS.names())
RUN_COLUMNS: Final = rows.RUNS.names()
BRIEF_RUN_COLUMNS: Final = rows.RUNS.names(blank={"config": "'{}'"})
"""The columns of runs, with an empty text in place of the configuration."""
ROLLOUT_COLUMNS: Final = rows.ROLLOUTS.names()
STEP_COLUMNS: Final = rows.STEPS.names()
BRIEF_STEP_COLUMNS: Final = rows.STEPS.names(
    blank={"rollouts": "'[]'", "digests": "'[]'", "groups": "'[]'", "extras": "NULL"}
)
"""The columns of steps, without the names of what was trained and without plugins' extras."""
RENEW_LEASE: Final = "UPDATE rollouts SET lease_until = ? WHERE id = ?"
GIVE_BACK: Final = (
    "UPDATE rollouts SET status = 'pending', spent = spent - 1, worker = '', lease_until = NULL WHERE n = ?"
)
CLOSE_ATTEMPT: Final = "UPDATE attempts SET ended_at = ?, ending = ? WHERE rollout = ? AND attempt = ?"
"""Ends an attempt that has no outcome, as `expired` or `released`."""
SELECT_TRANSITIONS: Final = (
    f"SELECT t.n, t.parent, t.digest, t.tokens, {rows.CALLS.names('t.')} FROM transitions t JOIN rollouts r ON r.n = t.rollout "  # noqa: S608
    "WHERE r.id = ? AND t.attempt = ? ORDER BY t.seq"
)
SELECT_BLOB: Final = "SELECT n, parent, tokens FROM transitions WHERE n = ?"
SELECT_GROUP_ROOTS: Final = (
    "SELECT t.n, t.parent, t.tokens FROM rollouts r JOIN transitions t ON t.rollout = r.n "
    "WHERE r.run = ? AND r.group_id = ? AND t.parent IS NULL ORDER BY t.n DESC LIMIT ?"
)


def places(count: int) -> str:
    """Return `count` parameters in parentheses."""
    return f"({', '.join('?' * count)})"


async def put_run(transaction: Transaction, run: Run) -> Run:
    """Create a run, or return the stored one (`Store.put_run`). A run without `created_at` gets the present time."""
    created = replace(run, created_at=run.created_at or await transaction.now())
    await transaction.run(INSERT_RUN, rows.RUNS.values(created))
    stored = await get_run(transaction, run.id)
    assert stored is not None, "the run was inserted in this transaction or before"
    return stored


async def get_run(transaction: Transaction, run: str) -> Run | None:
    """Return a run; None if it does not exist (`Store.get_run`)."""
    row = await transaction.one(f"SELECT {RUN_COLUMNS} FROM runs WHERE id = ?", (run,))  # noqa: S608
    return None if row is None else rows.RUNS.read(row)


async def list_runs(
    transaction: Transaction, project: str | None, after: str, limit: int | None, brief: bool
) -> list[Run]:
    """Return a list of runs, newest first (`Store.list_runs`)."""
    rollout_state.check_page(limit)
    given: dict[str, Row] = {} if project is None else {"project = ?": (project,)}
    if after:
        place = await transaction.one("SELECT created_at, n, project FROM runs WHERE id = ?", (after,))
        if place is None or project not in (None, place[2]):
            raise rollout_state.no_cursor(after)
        given["(created_at, n) < (?, ?)"] = tuple(place[:2])
    where = f" WHERE {' AND '.join(given)}" if given else ""
    columns = BRIEF_RUN_COLUMNS if brief else RUN_COLUMNS
    found = await transaction.all(
        f"SELECT {columns} FROM runs{where} ORDER BY created_at DESC, n DESC LIMIT ?",  # noqa: S608
        (*chain(*given.values()), limit or ALL),
    )
    return [rows.RUNS.read(row) for row in found]


# rollouts -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Standing:
    """The columns of a rollout that writers need. `parent` is the key, as text, of the call at which the rollout branches;
    empty for a rollout that is no branch."""

    n: int
    run: str
    group: str
    position: Position
    worker: str
    parent: str


async def standing(transaction: Transaction, rollout: str, *, held: bool = False) -> Standing:
    """Return the columns of a rollout that writers need. With `held` lock its row until the transaction ends. Raises
    `StoreError` if the rollout does not exist."""
    find = transaction.locked if held else transaction.all
    found = await find(
        "SELECT n, run, group_id, status, attempt, spent, max_attempts, worker, parent FROM rollouts WHERE id = ?",
        (rollout,),
    )
    if not found:
        raise rollout_state.unknown_rollout(rollout)
    n, run, group, status, attempt, spent, max_attempts, worker, parent = found[0]
    return Standing(n, run, group, Position(rollout, Status(status), attempt, spent, max_attempts), worker, parent)


async def create_rollouts(transaction: Transaction, rollouts: Sequence[Rollout]) -> int:
    """Insert the rollouts whose ids are new and return how many are (`Store.create_rollouts`)."""
    values = [rows.rollout_values(rollout) for rollout in rollouts]
    runs = sorted({rollout.run for rollout in rollouts})
    # A page ends at an `n`, and the next page is read later from there: until then no smaller `n` may be committed.
    await transaction.alone(*(f"rollouts {run}" for run in runs))
    new = await transaction.insert_new(INSERT_ROLLOUT, values)
    if new < len(rollouts):
        for rollout in rollouts:
            if (await standing(transaction, rollout.id)).run != rollout.run:
                raise rollout_state.created_elsewhere(rollout)
    if new:
        for run in runs:
            await transaction.changed(run)
    return new


async def get_rollout(transaction: Transaction, rollout: str) -> Rollout | None:
    """Return a rollout; None if it does not exist (`Store.get_rollout`)."""
    row = await transaction.one(f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE id = ?", (rollout,))  # noqa: S608
    return None if row is None else rows.ROLLOUTS.read(row)


async def list_rollouts(
    transaction: Transaction,
    run: str,
    split: str | None,
    step: int | None,
    status: Status | None,
    cursor: str,
    limit: int,
) -> Page[Rollout]:
    """Return a page of rollouts (`Store.list_rollouts`). The cursor is the `n` of the last rollout of the page before."""
    rollout_state.check_page(limit, cursor)
    asked = {"split": split, "step": step, "status": None if status is None else status.value}
    given = {name: value for name, value in asked.items() if value is not None}
    where = "".join(f" AND {name} = ?" for name in given)
    found = await transaction.all(
        f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts WHERE run = ? AND n > ?{where} ORDER BY n LIMIT ?",  # noqa: S608
        (run, int(cursor or 0), *given.values(), limit + 1),
    )
    rollouts = tuple(rows.ROLLOUTS.read(row[1:]) for row in found[:limit])
    return Page(rollouts, str(found[limit - 1][0]) if len(found) > limit else "")


async def count_rollouts(transaction: Transaction, run: str) -> list[RolloutCount]:
    """Count the rollouts of a run by split and status (`Store.count_rollouts`)."""
    found = await transaction.all(
        "SELECT split, status, count(*) FROM rollouts WHERE run = ? GROUP BY split, status ORDER BY 1, 2", (run,)
    )
    return [RolloutCount(split, Status(status), number) for split, status, number in found]


async def lease(transaction: Transaction, run: str, worker: str, limit: int, ttl: float, once: str) -> list[Lease]:
    """Give a worker up to `limit` rollouts for `ttl` seconds, each as a new attempt (`Store.lease`)."""
    rollout_state.check_lease(worker, limit, ttl)
    known_as = rollout_state.known_as(once, "lease", run, worker, ttl)
    if known_as and (leases := await _leased_before(transaction, known_as, worker, ttl)):
        return leases
    if known_as and not limit:
        return []
    now = await transaction.now()
    lapsed = await transaction.one(
        "SELECT 1 FROM rollouts WHERE run = ? AND status = 'running' AND lease_until <= ? LIMIT 1", (run, now)
    )
    found = await _lapsed(transaction, run, limit) if lapsed else []
    found += await transaction.free(
        f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts WHERE run = ? AND status = 'pending' ORDER BY n LIMIT ?",  # noqa: S608
        (run, limit),
    )
    leases, taken, begun, expired = [], [], [], []
    for n, *row in sorted(found, key=lambda row: int(row[0]))[:limit]:
        before = rows.ROLLOUTS.read(tuple(row))
        if before.status is Status.RUNNING:
            expired.append((now, "expired", before.id, before.attempt))
        begins = replace(  # without the result of a lost attempt
            before, status=Status.RUNNING, attempt=before.attempt + 1, fault=None, error="", seconds=0.0
        )
        leases.append(Lease(begins, worker, now + ttl))
        taken.append((before.attempt + 1, worker, now + ttl, n))
        begun.append((before.id, before.attempt + 1, worker, now))
    if len(found) > limit:  # some rows were locked and not taken: a worker that found nothing meanwhile must look again
        await transaction.changed(run)
    await transaction.many(CLOSE_ATTEMPT, expired)
    await transaction.many(
        "UPDATE rollouts SET status = 'running', attempt = ?, spent = spent + 1, worker = ?, lease_until = ?, fault = '', "
        "error = '', seconds = 0 WHERE n = ?",
        taken,
    )
    await transaction.many(INSERT_ATTEMPT, begun)
    if known_as and leases:
        given: list[Json] = [[lease.rollout.id, lease.attempt] for lease in leases]
        await keep_answer(transaction, known_as, run, min(ttl, KNOWN_SECONDS), given)
    return leases


async def _leased_before(transaction: Transaction, known_as: str, worker: str, ttl: float) -> list[Lease]:
    """Return the leases that the same call was given before, as far as the worker still holds them, renewed for `ttl` seconds.
    The list is empty if the call is new."""
    kept = cast("list[list[tuple[str, int]]]", await kept_answers(transaction, known_as))
    given = list(chain(*kept))
    # In the order of their ids, so that two calls that share rollouts do not wait for one another.
    standings = {rollout: await standing(transaction, rollout, held=True) for rollout, _ in sorted(given)}
    mine = [
        rollout
        for rollout, attempt in given
        if rollout_state.may_write(standings[rollout].position, attempt) and standings[rollout].worker == worker
    ]
    until = await transaction.now() + ttl
    await transaction.many(RENEW_LEASE, [(until, rollout) for rollout in mine])
    found = [await get_rollout(transaction, rollout) for rollout in mine]
    return [Lease(rollout, worker, until) for rollout in found if rollout is not None]


async def _lapsed(transaction: Transaction, run: str, limit: int) -> list[Row]:
    """Fail the rollouts whose lease expired on the last allowed attempt. Return up to `limit` of the other rollouts whose lease
    expired."""
    now = await transaction.now()
    for n, rollout, worker, attempt in await transaction.free(
        "SELECT n, id, worker, attempt FROM rollouts "
        "WHERE run = ? AND status = 'running' AND lease_until <= ? AND spent >= max_attempts",
        (run, now),
    ):
        await transaction.run(CLOSE_ATTEMPT, (now, "expired", rollout, attempt))
        await transaction.run(
            "UPDATE rollouts SET status = 'failed', fault = 'infrastructure', error = ?, lease_until = NULL, worker = '' "
            "WHERE n = ?",
            (rows.plain_text(f"the lease of worker {worker!r} expired on attempt {attempt}, the last one allowed"), n),
        )
        await transaction.changed(run)
    return await transaction.free(
        f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts WHERE run = ? AND status = 'running' AND lease_until <= ? "  # noqa: S608
        "AND spent < max_attempts ORDER BY n LIMIT ?",
        (run, now, limit),
    )


async def renew(transaction: Transaction, lease: Lease, ttl: float) -> Lease:
    """Renew a lease for `ttl` seconds from now (`Store.renew`)."""
    rollout_state.check_ttl(ttl)
    where = await standing(transaction, lease.rollout.id, held=True)
    rollout_state.check_fence(where.position, lease.attempt)
    if where.worker != lease.worker:
        raise rollout_state.not_holder(lease, where.worker)
    until = await transaction.now() + ttl
    await transaction.run(RENEW_LEASE, (until, lease.rollout.id))
    return Lease(lease.rollout, lease.worker, until)


async def complete(
    transaction: Transaction, rollout: str, attempt: int, end: rollout_state.Ending, spend: bool
) -> Rollout:
    """End an attempt and store its outcome (`Store.complete`); `end` is the checked outcome."""
    where = await standing(transaction, rollout, held=True)
    if not rollout_state.may_write(where.position, attempt):
        earlier = await transaction.one(
            "SELECT outcome_digest FROM attempts WHERE rollout = ? AND attempt = ?", (rollout, attempt)
        )
        if earlier is None or earlier[0] != end.digest:
            rollout_state.check_fence(where.position, attempt)
    else:
        excused = rollout_state.is_excused(where.position, end, spend=spend)
        status = Status.PENDING if excused else rollout_state.after(where.position, end)
        await transaction.run(
            "UPDATE rollouts SET status = ?, reward = ?, rewards = ?, fault = ?, error = ?, seconds = ?, lease_until = NULL, "
            "worker = '' WHERE n = ?",
            (status.value, *end.standing, where.n),
        )
        if excused:
            await transaction.run(GIVE_BACK, (where.n,))
        await transaction.run(
            "UPDATE attempts SET ended_at = ?, ending = ?, outcome_digest = ?, tool_events = ?, step_rewards = ?, labels = ?, "
            "step_states = ?, extras = ? WHERE rollout = ? AND attempt = ?",
            (
                await transaction.now(),
                end.fault or "reward",
                end.digest,
                *end.kept,
                rollout,
                attempt,
            ),
        )
        await transaction.changed(where.run)
    stored = await get_rollout(transaction, rollout)
    assert stored is not None, "the rollout was found in this transaction"
    return stored


@once_only
async def release(transaction: Transaction, worker: str) -> int:
    """Make the rollouts that a worker has leased pending again (`Store.release`)."""
    held = await transaction.locked(
        "SELECT n, id, attempt, run FROM rollouts WHERE worker = ? AND status = 'running'", (worker,)
    )
    now = await transaction.now()
    await transaction.many(CLOSE_ATTEMPT, [(now, "released", rollout, attempt) for _, rollout, attempt, _ in held])
    await transaction.many(GIVE_BACK, [(n,) for n, *_ in held])
    for run in {run for *_, run in held}:
        await transaction.changed(run)
    return len(held)


async def labels_of(transaction: Transaction, rollout: str, attempt: int) -> dict[str, rows.Label]:
    """Return the labels with which an attempt ended, by the ids of the calls; none for an attempt that has not ended."""
    row = await transaction.one("SELECT labels FROM attempts WHERE rollout = ? AND attempt = ?", (rollout, attempt))
    return {} if row is None else rows.labels_from_text(row[0])


# the calls of an attempt ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewCall:
    """A transition encoded as far as possible without its parent. `values` are the columns of `rows.CALLS` and the digest."""

    transition: Transition
    packed: codec.Packed
    tokens: Fingerprint
    values: tuple[rows.Value, ...]


def prepare(transition: Transition, late: codec.LatePrompts | None = None) -> NewCall:
    """Encode a transition before the transaction, during which nobody else can write. Raises `DataError` for a transition that
    cannot be stored."""
    arrays = codec.CallTokens(transition.prompt_ids, transition.response_ids, transition.logprobs)
    packed = codec.pack_tokens(arrays, late, (transition.rollout, transition.attempt, transition.caller.name))
    tokens = Fingerprint.of(packed.full, len(packed.prompt), packed.blocks)
    if transition.seq < 0:
        raise DataError(f"the seq of transition {transition.key} is negative: count the calls of an attempt from 0")
    values = rows.CALLS.values(transition)
    digest = rollout_state.row_digest(transition.rollout, transition.attempt, values, packed.digest)
    return NewCall(transition, packed, tokens, (*values, digest))


async def append(transaction: Transaction, calls: Sequence[NewCall]) -> int:
    """Store calls and return how many are new (`Store.append`)."""
    # In the order of their ids, so that two appends that share rollouts do not wait for one another.
    names = sorted({call.transition.rollout for call in calls})
    standings = {name: await standing(transaction, name, held=True) for name in names}
    return sum([await _append_one(transaction, standings[call.transition.rollout], call) for call in calls])


async def _append_one(transaction: Transaction, where: Standing, call: NewCall) -> bool:
    attempt = call.transition.attempt
    key = (where.n, attempt, call.transition.seq)
    if not rollout_state.may_write(where.position, attempt):
        await _repeat(transaction, where, key, call)
        return False
    parent, shared = await _parent(transaction, where, call)
    blob = codec.encode(call.packed, shared)
    n = await transaction.insert(INSERT_TRANSITION, (*key[:2], parent.key if parent else None, *call.values, blob))
    if n is None:
        await _repeat(transaction, where, key, call)
        return False
    known = KnownTransition(n, blob[: codec.HEAD_BYTES], call.tokens)
    extended = parent if parent is not None and parent.tokens.length == shared * codec.ITEM else None
    transaction.parents.add((where.n, attempt), known, extended)
    if parent is None:
        transaction.parents.add((where.run, where.group), known)
    return True


async def _repeat(transaction: Transaction, where: Standing, key: tuple[int, int, int], call: NewCall) -> None:
    """Check that a call equals the stored call with its key, and mark the stored call as aborted if this one is: its answer did
    not arrive. Raises `ConflictError` for another content, and `StaleAttemptError` for a call of an attempt that is not the
    running one if it is not stored, or to mark it."""
    row = await transaction.one(
        "SELECT digest, caller, untrained FROM transitions WHERE rollout = ? AND attempt = ? AND seq = ?", key
    )
    if row is None:
        rollout_state.check_fence(where.position, call.transition.attempt)
        raise AssertionError("a call is left out only where another one has its key")
    stored, *before = row
    labels = await labels_of(transaction, call.transition.rollout, call.transition.attempt)
    transition = labels.get(call.transition.id, rows.NO_LABEL).taken_off(call.transition, *before)
    content = call.packed.digest
    if stored == rollout_state.record_digest(transition, content):
        return
    for answered in rollout_state.answered(transition):
        if stored == rollout_state.record_digest(answered, content):
            rollout_state.check_fence(where.position, transition.attempt)
            await transaction.run(
                "UPDATE transitions SET status = ?, digest = ? WHERE rollout = ? AND attempt = ? AND seq = ?",
                (transition.status.value, call.values[-1], *key),
            )
            return
    raise rollout_state.stored_otherwise(transition)


async def _parent(transaction: Transaction, where: Standing, call: NewCall) -> tuple[KnownTransition[int] | None, int]:
    """Return the call against which a new call is best stored, and how many tokens they share; None and 0 for no such call.

    Candidates are the calls of this attempt, newest first, the roots of its group and, for a branch of a rollout of its group,
    the calls up to the one at which it branches. Calls of this attempt exist as long as its rollout, which this transaction has
    locked. Other calls may have been pruned with their whole group after they were cached, and SQLite may have given the number
    of one to another call.
    """
    attempt, group = (where.n, call.transition.attempt), (where.run, where.group)
    trunk = (*group, where.parent)
    prompt = Prompt(call.packed.prompt, call.tokens)
    own = await transaction.parents.get(
        attempt,
        lambda: _load(
            transaction,
            "SELECT n, parent, tokens FROM transitions WHERE rollout = ? AND attempt = ? ORDER BY n DESC LIMIT ?",
            (*attempt, LOADED_CALLS),
        ),
    )
    while True:
        roots = await transaction.parents.get(
            group, lambda: _load(transaction, SELECT_GROUP_ROOTS, (*group, CANDIDATES))
        )
        branched = await transaction.parents.get(trunk, lambda: _load_trunk(transaction, where)) if where.parent else []
        parent, shared = choose(prompt, chain(reversed(own), roots, branched))
        if parent is None or parent in own:
            return parent, shared
        # The row exists, has the cached content, and is of this group: rows that are removed together are stored together.
        if await transaction.kept(
            "SELECT n FROM transitions WHERE n = ? AND substr(tokens, 1, ?) = ? "
            "AND rollout IN (SELECT n FROM rollouts WHERE run = ? AND group_id = ?)",
            (parent.key, codec.HEAD_BYTES, parent.head, *group),
        ):
            return parent, shared
        transaction.parents.drop(group)
        transaction.parents.drop(trunk)


async def _load_trunk(transaction: Transaction, where: Standing) -> list[KnownTransition[int]]:
    """Load the calls of the branched attempt up to the call at which a rollout branches; none if that attempt is not of the
    rollout's group."""
    try:
        key = rows.call_from_text(where.parent, "its parent")
    except (StoreError, ValueError, TypeError):  # damaged: a read of the rollout itself raises the error
        return []
    return await _load(
        transaction,
        "SELECT t.n, t.parent, t.tokens FROM rollouts r JOIN transitions t ON t.rollout = r.n "
        "WHERE r.run = ? AND r.group_id = ? AND r.id = ? AND t.attempt = ? AND t.seq <= ? ORDER BY t.seq DESC LIMIT ?",
        (where.run, where.group, *(key or ()), LOADED_CALLS),
    )


async def _load(transaction: Transaction, query: str, values: tuple[str | int, ...]) -> list[KnownTransition[int]]:
    """Return the newest calls that the query finds, oldest first, without calls that a newer one extends."""
    decoder = Decoder(lambda n: transaction.one(SELECT_BLOB, (n,)))
    found: list[KnownTransition[int]] = []
    fulls: list[bytes] = []
    for n, parent, blob in await transaction.all(query, values):
        try:
            tokens = await decoder.decode(n, parent, blob)
        except StoreError:  # a damaged row is no parent for a new call; a read of the row itself raises the error
            continue
        full = codec.full_tokens(tokens)
        if not any(newer.startswith(full) for newer in fulls):
            fulls.append(full)
            fingerprint = Fingerprint.of(full, len(tokens.prompt_ids) * codec.ITEM)
            found.append(KnownTransition(n, blob[: codec.HEAD_BYTES], fingerprint))
    return found[::-1]


async def transitions(transaction: Transaction, rollout: str, attempt: int | None) -> list[Transition]:
    """Return the calls of an attempt in `seq` order (`Store.transitions`)."""
    if attempt is None:
        attempt = (await standing(transaction, rollout)).position.attempt
    return (await transitions_of(transaction, [(rollout, attempt)]))[0]


async def transitions_of(transaction: Transaction, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
    """Return the calls of each attempt (`Store.transitions_of`)."""
    decoder = Decoder(lambda n: transaction.one(SELECT_BLOB, (n,)))
    found = []
    for rollout, attempt in attempts:
        stored = await transaction.all(SELECT_TRANSITIONS, (rollout, attempt))
        if not stored:
            await standing(transaction, rollout)  # raises for an unknown rollout
        labels = await labels_of(transaction, rollout, attempt)
        calls = [await _decode(decoder, rollout, attempt, row) for row in stored]
        found.append([labels[call.id].put_on(call) if call.id in labels else call for call in calls])
    return found


async def _decode(decoder: Decoder, rollout: str, attempt: int, row: Row) -> Transition:
    n, parent, digest, blob, *described = row
    try:
        tokens = await decoder.decode(n, parent, blob)
        if rollout_state.row_digest(rollout, attempt, described, codec.stored_digest(blob)) != digest:
            raise StoreError("the row does not match the digest that was written with it")
        return rows.CALLS.read(
            described,
            rollout=rollout,
            attempt=attempt,
            prompt_ids=tokens.prompt_ids,
            response_ids=tokens.response_ids,
            logprobs=tokens.logprobs,
        )
    except (StoreError, ValueError, TypeError) as error:
        raise StoreError(
            f"transition {(rollout, attempt, described[0])} is corrupt: {error}. "
            "The database was damaged or edited: restore it from a backup"
        ) from error


async def next_seq(transaction: Transaction, rollout: str, attempt: int) -> int:
    """Return the `seq` behind the last call of an attempt (`Store.next_seq`)."""
    row = await transaction.one(
        "SELECT coalesce(max(t.seq) + 1, 0) FROM transitions t JOIN rollouts r ON r.n = t.rollout "
        "WHERE r.id = ? AND t.attempt = ?",
        (rollout, attempt),
    )
    return int(row[0]) if row else 0


async def attempts_of(transaction: Transaction, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
    """Return the end of each attempt (`Store.attempts_of`)."""
    found: list[Attempt] = []
    for start in range(0, len(attempts), IDS_AT_ONCE):
        asked = attempts[start : start + IDS_AT_ONCE]
        names = list(dict.fromkeys(rollout for rollout, _ in asked))
        ids = places(len(names))
        current: dict[str, int] = {
            row[0]: row[1]
            for row in await transaction.all(f"SELECT id, attempt FROM rollouts WHERE id IN {ids}", names)  # noqa: S608
        }
        kept = {
            (row[0], row[1]): row
            for row in await transaction.all(
                f"SELECT {rows.ATTEMPTS.names()} FROM attempts WHERE rollout IN {ids}",  # noqa: S608
                names,
            )
        }
        for rollout, attempt in asked:
            if rollout not in current:
                raise rollout_state.unknown_rollout(rollout)
            number = current[rollout] if attempt is None else attempt
            row = kept.get((rollout, number))
            found.append(Attempt(rollout, number) if row is None else rows.ATTEMPTS.read(row))
    return found


async def commit_step(transaction: Transaction, record: StepRecord) -> None:
    """Record a step and mark its rollouts as trained (`Store.commit_step`). A record without `at` gets the present time."""
    await transaction.alone(f"steps {record.run}")
    earlier = await transaction.one("SELECT digest FROM steps WHERE run = ? AND step = ?", (record.run, record.step))
    if earlier is not None:
        if earlier[0] != record.digest:
            raise rollout_state.committed_otherwise(record, earlier[0])
        return
    trained, reuse, first = sorted(record.rollouts), rollout_state.reuse_of(record), record.step
    for (rollout, _), (following, _) in pairwise(trained):
        if rollout == following:
            raise ConflictError(
                f"step {record.step} of run {record.run!r} names rollout {rollout!r} twice: a step trains each rollout once"
            )
    for start in range(0, len(trained), IDS_AT_ONCE):
        some = trained[start : start + IDS_AT_ONCE]
        names = [rollout for rollout, _ in some]
        locked = await transaction.locked(
            # In the order of their ids, so that two transactions that share some do not wait for one another.
            "SELECT id, run, status, fault, attempt, trained_at_step FROM rollouts "  # noqa: S608
            f"WHERE id IN {places(len(names))} ORDER BY id",
            names,
        )
        standing = {row[0]: row[1:] for row in locked}
        for rollout, attempt in some:
            first = min(first, _check_trainable(record, rollout, attempt, standing.get(rollout), reuse))
        if new := [name for name in names if name not in reuse.rollouts]:
            await transaction.run(
                f"UPDATE rollouts SET trained_at_step = ? WHERE id IN {places(len(new))}",  # noqa: S608
                (record.step, *new),
            )
    await _check_uses(transaction, record, reuse, first)
    committed = replace(record, at=record.at or await transaction.now())
    await transaction.run(INSERT_STEP, rows.STEPS.values(committed))
    await transaction.changed(record.run)


def _check_trainable(
    record: StepRecord, rollout: str, attempt: int, found: Row | None, reuse: rollout_state.Reuse
) -> int:
    """Check that a step may train a rollout, whose columns are `found`. Return the first step that trained the rollout: this
    one, or an earlier one for a declared reuse. Raises `StoreError` if the step may not."""
    if found is None:
        raise rollout_state.unknown_rollout(rollout)
    run, status, fault, current, trained = found
    rollout_state.check_trainable(record, rollout, attempt, run, status, fault, current)
    declared = rollout in reuse.rollouts
    if declared != (trained is not None and trained < record.step) or (not declared and trained is not None):
        raise rollout_state.not_new(record, rollout, trained, declared=declared)
    return trained if declared else record.step


async def _check_uses(transaction: Transaction, record: StepRecord, reuse: rollout_state.Reuse, first: int) -> None:
    """Raise `ConflictError` if a rollout was reused more often than declared. Steps before `first` trained none of the reused
    rollouts."""
    if not reuse.rollouts:
        return
    uses = Counter[str]()
    for (text,) in await transaction.all("SELECT rollouts FROM steps WHERE run = ? AND step >= ?", (record.run, first)):
        uses.update(name for name, _ in json.loads(text) if name in reuse.rollouts)
    for rollout, steps in sorted(uses.items()):
        if steps > reuse.limit:
            raise rollout_state.used_up(record, rollout, steps, reuse.limit)


async def steps(transaction: Transaction, run: str, after: int, limit: int | None, brief: bool) -> list[StepRecord]:
    """Return committed steps in order (`Store.steps`)."""
    rollout_state.check_page(limit)
    columns = BRIEF_STEP_COLUMNS if brief else STEP_COLUMNS
    found = await transaction.all(
        f"SELECT {columns} FROM steps WHERE run = ? AND step > ? ORDER BY step LIMIT ?",  # noqa: S608
        (run, after, limit or ALL),
    )
    return [rows.STEPS.read(row) for row in found]


async def last_step(transaction: Transaction, run: str) -> StepRecord | None:
    """Return the newest committed step; None without steps (`Store.last_step`)."""
    row = await transaction.one(
        f"SELECT {STEP_COLUMNS} FROM steps WHERE run = ? ORDER BY step DESC LIMIT 1",  # noqa: S608
        (run,),
    )
    return None if row is None else rows.STEPS.read(row)


@once_only
async def log_metrics(transaction: Transaction, run: str, step: int, values: Mapping[str, float]) -> None:
    """Add values to the metrics of a step (`Store.log_metrics`)."""
    now = await transaction.now()
    await transaction.many(
        "INSERT INTO metrics (run, step, name, value, at) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (run, step, name) DO UPDATE SET value = excluded.value, at = excluded.at",
        [(run, step, name, float(value), now) for name, value in sorted(values.items())],
    )


async def metrics(transaction: Transaction, run: str) -> list[MetricPoint]:
    """Return the metrics of a run, sorted by step (`Store.metrics`)."""
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for step, name, value, at in await transaction.all(
        "SELECT step, name, value, at FROM metrics WHERE run = ? ORDER BY step, name", (run,)
    ):
        steps.setdefault(step, {})[name] = math.nan if value is None else value
        times[step] = max(at, times.get(step, at))
    return [MetricPoint(step, values, times[step]) for step, values in steps.items()]


@once_only
async def put_state(transaction: Transaction, run: str, key: str, value: str) -> None:
    """Keep a value under a key of the state (`Store.put_state`); `value` is JSON."""
    await transaction.run(
        "INSERT INTO state (run, name, value) VALUES (?, ?, ?) ON CONFLICT (run, name) DO UPDATE SET value = excluded.value",
        (run, key, value),
    )
    await transaction.changed(run)


async def keep_state(transaction: Transaction, run: str, key: str, value: str) -> Json:
    """Keep a value if the key has none (`Store.keep_state`); `value` is JSON."""
    if await transaction.run(
        "INSERT INTO state (run, name, value) VALUES (?, ?, ?) ON CONFLICT (run, name) DO NOTHING",
        (run, key, value),
    ):
        await transaction.changed(run)
    return await get_state(transaction, run, key)


async def get_state(transaction: Transaction, run: str, key: str) -> Json:
    """Return the value under a key of the state; None if there is none (`Store.get_state`)."""
    row = await transaction.one("SELECT value FROM state WHERE run = ? AND name = ?", (run, key))
    return None if row is None else rows.load(row[0], f"the state {key!r} of run {run!r}")
