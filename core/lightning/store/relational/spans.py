"""Appending spans and reading them back.

The invariant: a span belongs to the attempt that was current when it arrived, its first content stays, and no attempt has more
than `MAX_SPANS` of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.errors import StoreError
from lightning.store import rows, sql
from lightning.store.protocol import MAX_SPANS
from lightning.store.relational.rollouts import held_standing, standing
from lightning.store.relational.transaction import Transaction
from lightning.types import Span


async def append(transaction: Transaction, spans: Sequence[Span]) -> int:
    """See `Store.append_spans`."""
    attempts: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        attempts.setdefault((span.rollout, span.attempt), []).append(span)
    return sum([await _append(transaction, *attempt, attempts[attempt]) for attempt in sorted(attempts)])


async def _append(transaction: Transaction, rollout: str, attempt: int, spans: Sequence[Span]) -> int:
    try:
        where = await held_standing(transaction, rollout)
    except StoreError:  # a rollout nobody created must not cost the spans of the others
        return 0
    if attempt < 1 or where.position.attempt != attempt:
        return 0
    key = (where.n, attempt)
    (count,) = await transaction.one(sql.COUNT_SPANS, key) or (0,)
    stored = 0
    for span in spans:
        if count < MAX_SPANS:
            count += await transaction.run(sql.INSERT_SPAN, (*key, *rows.SPANS.values(span)))
            stored += 1
        else:
            stored += await transaction.one(sql.SELECT_SPAN, (*key, span.span_id)) is not None
    return stored


async def read(transaction: Transaction, rollout: str, attempt: int | None) -> list[Span]:
    """See `Store.spans`."""
    where = await standing(transaction, rollout)
    attempt = where.position.attempt if attempt is None else attempt
    found = await transaction.all(sql.SELECT_SPANS, (where.n, attempt))
    return [rows.SPANS.read(row, rollout=rollout, attempt=attempt) for row in found]
