"""Labels: the names that an agent gave to its model calls after it had made them.

The invariant: labels are written in the transaction that ends their attempt, to calls of that attempt only, and a row that was
damaged before stays recognizably damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning.errors import StoreError
from lightning.store import codec, json_text, rollout_state, rows, sql
from lightning.store.relational.transaction import Transaction
from lightning.store.rows import Row
from lightning.types import Caller, Transition, logprobs, token_ids


async def name_callers(
    transaction: Transaction, n: int, rollout: str, attempt: int, labels: Mapping[str, Caller]
) -> None:
    """Make `labels` the callers of the calls with these response ids. `n` is the row of the rollout."""
    if not labels:
        return
    changes: list[tuple[str, bytes, int]] = []
    for call, digest, head, *described in await transaction.all(sql.SELECT_HEADS, (codec.HEAD_BYTES, n, attempt)):
        transition = _intact(rollout, attempt, tuple(described), head, digest)
        caller = labels.get(transition.id) if transition is not None else None
        if transition is None or caller is None:
            continue
        labelled = rollout_state.transition_digest(replace(transition, caller=caller), codec.stored_digest(head))
        changes.append((json_text.dump(json_text.caller_to_json(caller)), labelled, call))
    await transaction.many(sql.NAME_CALLER, changes)


async def labels_of(transaction: Transaction, rollout: str, attempt: int) -> dict[str, Caller]:
    """The labels an attempt was completed with."""
    row = await transaction.one(sql.SELECT_LABELS, (rollout, attempt))
    return {} if row is None else json_text.labels_from_text(row[0])


def _intact(rollout: str, attempt: int, described: Row, head: bytes, digest: bytes) -> Transition | None:
    """A stored call without its tokens; None for a damaged row, since a new digest would make it look whole."""
    try:
        transition = rows.transition_from_row(rollout, attempt, described, token_ids(), token_ids(), logprobs())
        return transition if rollout_state.transition_digest(transition, codec.stored_digest(head)) == digest else None
    except (StoreError, ValueError, TypeError):
        return None
