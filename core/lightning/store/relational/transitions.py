"""Appending model calls and reading them back.

The invariant: one key has one content for ever, but for the caller that a label names, and what is read back is checked against
the digest written with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from lightning.errors import ConflictError, DataError, StoreError
from lightning.store import codec, json_text, rows, rules, sql
from lightning.store.relational.labels import labels_of
from lightning.store.relational.parents import Decoder, Known, choose
from lightning.store.relational.rollouts import Standing, held_standing, standing
from lightning.store.relational.transaction import Transaction
from lightning.store.rows import Row
from lightning.types import Transition

GROUP_ROOTS: Final = 32
"""How many roots of a group are looked at for a parent."""


async def append(transaction: Transaction, transitions: Sequence[Transition]) -> int:
    """See `Store.append`."""
    # In the order of their ids, so that two appends that share rollouts do not wait for one another.
    names = sorted({transition.rollout for transition in transitions})
    standings = {name: await held_standing(transaction, name) for name in names}
    return sum([await _append_one(transaction, standings[call.rollout], call) for call in transitions])


async def append_again(transaction: Transaction, new: int, transitions: Sequence[Transition]) -> int:
    """`append` after a try that stored so many new ones and whose end nobody heard of: if none is new now, it was committed."""
    return await append(transaction, transitions) or new


async def _append_one(transaction: Transaction, where: Standing, transition: Transition) -> bool:
    key = (where.n, transition.attempt, transition.seq)
    if not rules.may_write(where.position, transition.attempt):
        if not await _is_repeated(transaction, key, transition):
            rules.check_fence(where.position, transition.attempt)
        return False
    prompt = codec.pack(transition.prompt_ids)
    parent = await _parent(transaction, where, transition.attempt, prompt)
    blob = codec.encode(_tokens(transition), parent.full if parent else b"")
    n = await transaction.insert(
        sql.INSERT_TRANSITION,
        (*key, parent.n if parent else None, *_values(transition, codec.stored_digest(blob)), blob),
    )
    if n is None:
        assert await _is_repeated(transaction, key, transition), "what is in the way of a call has its key"
        return False
    known = Known(n, blob[: codec.HEAD_BYTES], prompt + codec.pack(transition.response_ids))
    transaction.parents.add((where.n, transition.attempt), known)
    if parent is None:
        transaction.parents.add((where.run, where.group), known)
    return True


async def _is_repeated(transaction: Transaction, key: tuple[int, int, int], transition: Transition) -> bool:
    row = await transaction.one(sql.SELECT_TRANSITION_DIGEST, key)
    if row is None:
        return False
    content = codec.content_digest(
        codec.pack(transition.prompt_ids), codec.pack(transition.response_ids), codec.pack(transition.logprobs)
    )
    if row[0] not in await _digests(transaction, transition, content):
        raise ConflictError(
            f"transition {transition.key} is stored already with other content: give each call of an attempt its own seq "
            "(next_seq() says the first unused one)"
        )
    return True


async def _digests(transaction: Transaction, transition: Transition, content: bytes) -> list[bytes]:
    """What the digest of a stored call may be if it is this one: as it was appended, and as it was labelled since."""
    labels = await labels_of(transaction, transition.rollout, transition.attempt)
    named = [transition] + ([replace(transition, caller=labels[transition.id])] if transition.id in labels else [])
    return [rules.transition_digest(each, content) for each in named]


async def _parent(transaction: Transaction, where: Standing, attempt: int, prompt: bytes) -> Known | None:
    """The best of the calls of this attempt, newest first, and of the roots of its group.

    The calls of an attempt are as safe as its rollout, which this transaction holds. A root may have been pruned since it was
    remembered, and its whole group with it; SQLite may have given its number to another call since.
    """
    own = await transaction.parents.get(
        (where.n, attempt), lambda: _load(transaction, sql.SELECT_BLOBS, (where.n, attempt))
    )
    group = (where.run, where.group)
    while True:
        roots = await transaction.parents.get(
            group, lambda: _load(transaction, sql.SELECT_GROUP_ROOTS, (*group, GROUP_ROOTS))
        )
        parent = choose(prompt, chain(reversed(own), roots[:GROUP_ROOTS]))
        if parent is None or parent in own:
            return parent
        if await transaction.kept(sql.SELECT_ROOT, (parent.n, codec.HEAD_BYTES, parent.head, *group)):
            return parent
        transaction.parents.drop(group)


async def _load(transaction: Transaction, query: str, values: tuple[str | int, ...]) -> list[Known]:
    decoder, found = Decoder(lambda n: transaction.one(sql.SELECT_BLOB, (n,))), []
    for n, parent, blob in await transaction.all(query, values):
        try:
            await decoder.decode(n, parent, blob)
        except StoreError:  # a damaged row is no parent for a new call; whoever reads the row itself gets the error
            continue
        found.append(Known(n, blob[: codec.HEAD_BYTES], decoder.full(n)))
    return found


def _tokens(transition: Transition) -> codec.Tokens:
    return codec.Tokens(transition.prompt_ids, transition.response_ids, transition.logprobs)


def _values(transition: Transition, content: bytes) -> tuple[rows.Value, ...]:
    what = f"of transition {transition.key}"
    if transition.seq < 0:
        raise DataError(f"the seq {what} is negative: count the calls of an attempt from 0")
    return (
        transition.id,
        json_text.dump(json_text.caller_to_json(transition.caller)),
        json_text.versions_to_text(transition.versions),
        transition.status.value,
        transition.finish_reason,
        transition.choice,
        json_text.finite(transition.temperature, f"the temperature {what}"),
        int(transition.constrained),
        json_text.finite(transition.started_at, f"started_at {what}"),
        json_text.finite(transition.ended_at, f"ended_at {what}"),
        json_text.dump(list(transition.tool_calls), f"a tool call {what}"),
        json_text.conversation_to_text(transition.conversation),
        rules.transition_digest(transition, content),
    )


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
        transition = rows.transition_from_row(
            rollout, attempt, tuple(described), tokens.prompt_ids, tokens.response_ids, tokens.logprobs
        )
        if rules.transition_digest(transition, codec.stored_digest(blob)) != digest:
            raise StoreError("the row does not match the digest that was written with it")
    except (StoreError, ValueError, TypeError) as error:
        raise StoreError(
            f"transition {(rollout, attempt, described[0])} is corrupt: {error}. "
            "The database was damaged or edited: restore it from a backup"
        ) from error
    return transition


async def next_seq(transaction: Transaction, rollout: str, attempt: int) -> int:
    """See `Store.next_seq`."""
    row = await transaction.one(sql.SELECT_NEXT_SEQ, (rollout, attempt))
    return int(row[0]) if row else 0
