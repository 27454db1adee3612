"""Spans in SQL databases, in one table.

The invariant: it keeps what `lightning_otel.traces.store` promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning.errors import StoreError
from lightning.store import rows
from lightning.store.relational.operations import standing
from lightning.store.relational.transaction import SqlPart, Transaction
from lightning.types import Span, by_key

from lightning_otel.traces.store import MAX_SPANS

# `rollout` holds the `n` of a row of rollouts, as in transitions.
TABLE: Final = """CREATE TABLE spans (
    n INTEGER PRIMARY KEY,
    rollout INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    span_id TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    parent_id TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL NOT NULL,
    status TEXT NOT NULL,
    error TEXT NOT NULL,
    service TEXT NOT NULL,
    attributes TEXT NOT NULL,
    UNIQUE (rollout, attempt, span_id)
)"""
COLUMNS: Final = rows.SPANS.names()
_PLACES: Final = ", ".join("?" for _ in ("rollout", "attempt", *rows.SPANS.columns))
INSERT: Final = (
    f"INSERT INTO spans (rollout, attempt, {COLUMNS}) VALUES ({_PLACES}) "  # noqa: S608
    "ON CONFLICT (rollout, attempt, span_id) DO NOTHING"
)
COUNT: Final = "SELECT count(*) FROM spans WHERE rollout = ? AND attempt = ?"
SELECT_ONE: Final = "SELECT 1 FROM spans WHERE rollout = ? AND attempt = ? AND span_id = ?"
SELECT: Final = f"SELECT {COLUMNS} FROM spans WHERE rollout = ? AND attempt = ? ORDER BY started_at, span_id"  # noqa: S608


async def append(transaction: Transaction, spans: Sequence[Span]) -> int:
    """Store spans, and return how many of them are stored now."""
    attempts = by_key(spans, lambda span: (span.rollout, span.attempt))
    return sum([await _append(transaction, *attempt, attempts[attempt]) for attempt in sorted(attempts)])


async def _append(transaction: Transaction, rollout: str, attempt: int, spans: Sequence[Span]) -> int:
    try:
        where = await standing(transaction, rollout, held=True)
    except StoreError:  # an unknown rollout must not cost the spans of others
        return 0
    if attempt < 1 or where.position.attempt != attempt:
        return 0
    key = (where.n, attempt)
    (count,) = await transaction.one(COUNT, key) or (0,)
    stored = 0
    for span in spans:
        if count < MAX_SPANS:
            count += await transaction.run(INSERT, (*key, *rows.SPANS.values(span)))
            stored += 1
        else:
            stored += await transaction.one(SELECT_ONE, (*key, span.span_id)) is not None
    return stored


async def read(transaction: Transaction, rollout: str, attempt: int | None) -> list[Span]:
    """Return the spans of an attempt (None: the current one) in the order they began."""
    where = await standing(transaction, rollout)
    attempt = where.position.attempt if attempt is None else attempt
    found = await transaction.all(SELECT, (where.n, attempt))
    return [rows.SPANS.read(row, rollout=rollout, attempt=attempt) for row in found]


PART: Final = SqlPart(reads={"spans": read}, writes={"append_spans": append}, tables=((TABLE,),))
