"""Appending model calls and reading them back.

The invariant: one key has one content for ever, but for the caller that a label names, and what is read back is checked against
the digest written with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from lightning.errors import ConflictError, DataError, StoreError
from lightning.store import codec, rows, rules, sql
from lightning.store.rows import Row
from lightning.store.sqlite.connection import Transaction
from lightning.store.sqlite.labels import labels_of
from lightning.store.sqlite.parents import Decoder, Known, choose
from lightning.store.sqlite.rollouts import Standing, standing
from lightning.types import Transition

GROUP_ROOTS: Final = 32
"""How many roots of a group are looked at for a parent."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """One `append`: the rollouts it touches are looked up once."""

    transaction: Transaction
    standings: dict[str, Standing]

    def standing(self, rollout: str) -> Standing:
        if rollout not in self.standings:
            self.standings[rollout] = standing(self.transaction, rollout)
        return self.standings[rollout]


def append(transaction: Transaction, transitions: Sequence[Transition]) -> int:
    """See `Store.append`."""
    batch = _Batch(transaction, {})
    return sum(_append_one(batch, transition) for transition in transitions)


def _append_one(batch: _Batch, transition: Transition) -> bool:
    where = batch.standing(transition.rollout)
    key = (where.n, transition.attempt, transition.seq)
    if _is_repeated(batch.transaction, key, transition):
        return False
    rules.check_fence(where.position, transition.attempt)
    prompt = codec.pack(transition.prompt_ids)
    parent = choose(prompt, _candidates(batch.transaction, where, transition.attempt))
    blob = codec.encode(_tokens(transition), parent.full if parent else b"")
    n = batch.transaction.insert(
        sql.INSERT_TRANSITION,
        (*key, parent.n if parent else None, *_values(transition, codec.stored_digest(blob)), blob),
    )
    known = Known(n, prompt + codec.pack(transition.response_ids))
    batch.transaction.parents.add((where.n, transition.attempt), known)
    if parent is None:
        batch.transaction.parents.add((where.run, where.group), known)
    return True


def _is_repeated(transaction: Transaction, key: tuple[int, int, int], transition: Transition) -> bool:
    row = transaction.one(sql.SELECT_TRANSITION_DIGEST, key)
    if row is None:
        return False
    content = codec.content_digest(
        codec.pack(transition.prompt_ids), codec.pack(transition.response_ids), codec.pack(transition.logprobs)
    )
    if row[0] not in _digests(transaction, transition, content):
        raise ConflictError(
            f"transition {transition.key} is stored already with other content: give each call of an attempt its own seq "
            "(next_seq() says the first unused one)"
        )
    return True


def _digests(transaction: Transaction, transition: Transition, content: bytes) -> Iterator[bytes]:
    """What the digest of a stored call may be if it is this one: as it was appended, and as it was labelled since."""
    yield rules.transition_digest(transition, content)
    caller = labels_of(transaction, transition.rollout, transition.attempt).get(transition.id)
    if caller is not None:
        yield rules.transition_digest(replace(transition, caller=caller), content)


def _candidates(transaction: Transaction, where: Standing, attempt: int) -> Iterable[Known]:
    """Calls of this attempt, newest first, then the roots of its group."""
    own = transaction.parents.get((where.n, attempt), lambda: _load(transaction, sql.SELECT_BLOBS, (where.n, attempt)))
    roots = transaction.parents.get(
        (where.run, where.group),
        lambda: _load(transaction, sql.SELECT_GROUP_ROOTS, (where.run, where.group, GROUP_ROOTS)),
    )
    return chain(reversed(own), roots[:GROUP_ROOTS])


def _load(transaction: Transaction, query: str, values: tuple[str | int, ...]) -> Iterator[Known]:
    decoder = Decoder(lambda n: transaction.one(sql.SELECT_BLOB, (n,)))
    for n, parent, blob in transaction.all(query, values):
        try:
            decoder.decode(n, parent, blob)
        except StoreError:  # a damaged row is no parent for a new call; whoever reads the row itself gets the error
            continue
        yield Known(n, decoder.full(n))


def _tokens(transition: Transition) -> codec.Tokens:
    return codec.Tokens(transition.prompt_ids, transition.response_ids, transition.logprobs)


def _values(transition: Transition, content: bytes) -> tuple[rows.Value, ...]:
    what = f"of transition {transition.key}"
    if transition.seq < 0:
        raise DataError(f"the seq {what} is negative: count the calls of an attempt from 0")
    return (
        transition.id,
        rows.dump(rows.caller_to_json(transition.caller)),
        rows.versions_to_text(transition.versions),
        transition.status.value,
        transition.finish_reason,
        transition.choice,
        rows.finite(transition.temperature, f"the temperature {what}"),
        int(transition.constrained),
        rows.finite(transition.started_at, f"started_at {what}"),
        rows.finite(transition.ended_at, f"ended_at {what}"),
        rows.dump(list(transition.tool_calls), f"a tool call {what}"),
        rules.transition_digest(transition, content),
    )


def read(transaction: Transaction, rollout: str, attempt: int | None) -> list[Transition]:
    """See `Store.transitions`."""
    if attempt is None:
        attempt = standing(transaction, rollout).position.attempt
    return read_many(transaction, [(rollout, attempt)])[0]


def read_many(transaction: Transaction, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
    """See `Store.transitions_of`."""
    decoder = Decoder(lambda n: transaction.one(sql.SELECT_BLOB, (n,)))
    found = []
    for rollout, attempt in attempts:
        stored = transaction.all(sql.SELECT_TRANSITIONS, (rollout, attempt))
        if not stored:
            standing(transaction, rollout)  # raises for a rollout nobody created
        found.append([_decode(decoder, rollout, attempt, row) for row in stored])
    return found


def _decode(decoder: Decoder, rollout: str, attempt: int, row: Row) -> Transition:
    n, parent, digest, blob, *described = row
    try:
        tokens = decoder.decode(n, parent, blob)
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


def next_seq(transaction: Transaction, rollout: str, attempt: int) -> int:
    """See `Store.next_seq`."""
    row = transaction.one(sql.SELECT_NEXT_SEQ, (rollout, attempt))
    return int(row[0]) if row else 0
