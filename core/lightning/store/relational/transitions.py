"""Appending the model calls that an attempt reports, and reading them back.

The invariant: one key has one content for ever, but for the caller that a label names and for an answer that did not arrive,
and a call that is read back is checked against the digest written with it. A span belongs to the attempt that was current when
it arrived, its first content stays, and no attempt has more than `MAX_SPANS` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lightning.errors import ConflictError, DataError, StoreError
from lightning.store import codec, rollout_state, rows, sql
from lightning.store.relational.prefix_parents import (
    CANDIDATES,
    LOADED_CALLS,
    Decoder,
    Fingerprint,
    KnownTransition,
    Prompt,
    choose,
)
from lightning.store.relational.rollouts import Standing, held_standing, labels_of, standing
from lightning.store.relational.transaction import Transaction
from lightning.store.rows import Row
from lightning.types import Transition


@dataclass(frozen=True, slots=True)
class NewCall:
    """A transition in database form, but for what depends on the calls stored before it. `values` are
    its described columns and its digest."""

    transition: Transition
    packed: codec.Packed
    tokens: Fingerprint
    values: tuple[rows.Value, ...]


def prepare(transition: Transition) -> NewCall:
    """Everything that can be done before the transaction, which keeps others from writing. Raises `DataError`."""
    packed = codec.pack_tokens(codec.CallTokens(transition.prompt_ids, transition.response_ids, transition.logprobs))
    tokens = Fingerprint.of(packed.full, len(packed.prompt))
    return NewCall(transition, packed, tokens, _values(transition, packed.digest))


async def append(transaction: Transaction, calls: Sequence[NewCall]) -> int:
    """See `Store.append`."""
    # In the order of their ids, so that two appends that share rollouts do not wait for one another.
    names = sorted({call.transition.rollout for call in calls})
    standings = {name: await held_standing(transaction, name) for name in names}
    return sum([await _append_one(transaction, standings[call.transition.rollout], call) for call in calls])


async def append_again(transaction: Transaction, new: int, calls: Sequence[NewCall]) -> int:
    """`append` after a try that stored so many new ones and whose end nobody heard of: if none is new now, it was committed."""
    return await append(transaction, calls) or new


async def _append_one(transaction: Transaction, where: Standing, call: NewCall) -> bool:
    attempt = call.transition.attempt
    key = (where.n, attempt, call.transition.seq)
    if not rollout_state.may_write(where.position, attempt):
        if not await _is_repeated(transaction, where, key, call):
            rollout_state.check_fence(where.position, attempt)
        return False
    parent, shared = await _parent(transaction, where, call)
    blob = codec.encode_packed(call.packed, shared)
    n = await transaction.insert(sql.INSERT_TRANSITION, (*key[:2], parent.n if parent else None, *call.values, blob))
    if n is None:
        assert await _is_repeated(transaction, where, key, call), "what is in the way of a call has its key"
        return False
    known = KnownTransition(n, blob[: codec.HEAD_BYTES], call.tokens)
    extended = parent if parent is not None and parent.tokens.is_extended(shared) else None
    transaction.parents.add((where.n, attempt), known, extended)
    if parent is None:
        transaction.parents.add((where.run, where.group), known)
    return True


async def _is_repeated(transaction: Transaction, where: Standing, key: tuple[int, int, int], call: NewCall) -> bool:
    """Whether the call is stored; as one that was answered when it did not arrive, and then no longer."""
    row = await transaction.one(sql.SELECT_TRANSITION_DIGEST, key)
    if row is None:
        return False
    if row[0] in await _digests(transaction, call.transition, call.packed.digest):
        return True
    for answered in rollout_state.answered(call.transition):
        if row[0] in await _digests(transaction, answered, call.packed.digest):
            rollout_state.check_fence(where.position, call.transition.attempt)
            await transaction.run(sql.MARK_ABORTED, (call.transition.status.value, call.values[-1], *key))
            return True
    raise ConflictError(
        f"transition {call.transition.key} is stored already with other content: give each call of an attempt its own seq "
        "(next_seq() says the first unused one)"
    )


async def _digests(transaction: Transaction, transition: Transition, content: bytes) -> list[bytes]:
    """What the digest of a stored call may be if it is this one: as it was appended, and as it was labelled since."""
    labels = await labels_of(transaction, transition.rollout, transition.attempt)
    named = [transition] + ([replace(transition, caller=labels[transition.id])] if transition.id in labels else [])
    return [rollout_state.record_digest(each, content) for each in named]


async def _parent(transaction: Transaction, where: Standing, call: NewCall) -> tuple[KnownTransition | None, int]:
    """The best of the calls of this attempt, newest first, of the roots of its group and, if it is a branch of a rollout of its
    group, of the calls up to the one it branches; and how many tokens it shares.

    The calls of an attempt are as safe as its rollout, which this transaction holds. Another may have been pruned since it was
    remembered, and its whole group with it; SQLite may have given its number to another call since.
    """
    attempt, group = (where.n, call.transition.attempt), (where.run, where.group)
    trunk = (*group, where.parent)
    prompt = Prompt(call.packed.prompt, call.tokens)
    own = await transaction.parents.get(
        attempt, lambda: _load(transaction, sql.SELECT_LAST_BLOBS, (*attempt, LOADED_CALLS))
    )
    while True:
        roots = await transaction.parents.get(
            group, lambda: _load(transaction, sql.SELECT_GROUP_ROOTS, (*group, CANDIDATES))
        )
        branched = await transaction.parents.get(trunk, lambda: _load_trunk(transaction, where)) if where.parent else []
        parent, shared = choose(prompt, chain(reversed(own), roots, branched))
        if parent is None or parent in own:
            return parent, shared
        if await transaction.kept(sql.SELECT_IN_GROUP, (parent.n, codec.HEAD_BYTES, parent.head, *group)):
            return parent, shared
        transaction.parents.drop(group)
        transaction.parents.drop(trunk)


async def _load_trunk(transaction: Transaction, where: Standing) -> list[KnownTransition]:
    try:
        key = rows.call_from_text(where.parent, "its parent")
    except (StoreError, ValueError, TypeError):  # damaged: whoever reads the rollout itself gets the error
        return []
    assert key is not None, "asked where there is a parent"
    return await _load(transaction, sql.SELECT_TRUNK, (where.run, where.group, *key, LOADED_CALLS))


async def _load(transaction: Transaction, query: str, values: tuple[str | int, ...]) -> list[KnownTransition]:
    """The newest calls that the query finds, oldest first, without those that a newer one extends."""
    decoder = Decoder(lambda n: transaction.one(sql.SELECT_BLOB, (n,)))
    found: list[KnownTransition] = []
    fulls: list[bytes] = []
    for n, parent, blob in await transaction.all(query, values):
        try:
            tokens = await decoder.decode(n, parent, blob)
        except StoreError:  # a damaged row is no parent for a new call; whoever reads the row itself gets the error
            continue
        full = decoder.full(n)
        if not any(newer.startswith(full) for newer in fulls):
            fulls.append(full)
            fingerprint = Fingerprint.of(full, len(codec.pack(tokens.prompt_ids)))
            found.append(KnownTransition(n, blob[: codec.HEAD_BYTES], fingerprint))
    return found[::-1]


def _values(transition: Transition, content: bytes) -> tuple[rows.Value, ...]:
    if transition.seq < 0:
        raise DataError(f"the seq of transition {transition.key} is negative: count the calls of an attempt from 0")
    values = rows.CALLS.values(transition)
    return (*values, rollout_state.row_digest(transition.rollout, transition.attempt, values, content))


async def read(transaction: Transaction, rollout: str, attempt: int | None) -> list[Transition]:
    """See `Store.transitions`."""
    if attempt is None:
        attempt = (await standing(transaction, rollout)).position.attempt
    return (await read_many(transaction, [(rollout, attempt)]))[0]


async def read_many(transaction: Transaction, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
    """See `Store.transitions_of`."""
    decoder = Decoder(lambda n: transaction.one(sql.SELECT_BLOB, (n,)))
    found = []
    for rollout, attempt in attempts:
        stored = await transaction.all(sql.SELECT_TRANSITIONS, (rollout, attempt))
        if not stored:
            await standing(transaction, rollout)  # raises for a rollout nobody created
        found.append([await _decode(decoder, rollout, attempt, row) for row in stored])
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
    """See `Store.next_seq`."""
    row = await transaction.one(sql.SELECT_NEXT_SEQ, (rollout, attempt))
    return int(row[0]) if row else 0
