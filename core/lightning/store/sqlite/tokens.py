"""Tokens of the control API: kept by the digest of their secret, never deleted.

The invariant: a token that was revoked stays revoked.
"""

from __future__ import annotations

from lightning.errors import ConflictError, StoreError
from lightning.store import rows, sql
from lightning.store.sqlite.connection import Transaction
from lightning.types import Token


def put(transaction: Transaction, token: Token) -> Token:
    """See `Store.put_token`. A token without a time of its own is created now."""
    values = (*rows.token_values(token), token.created_at or transaction.now, token.expires_at, token.revoked_at)
    if not transaction.run(sql.INSERT_TOKEN, values):
        raise ConflictError(f"there is a token {token.id!r} already: make one with another id")
    stored = get(transaction, token.id)
    assert stored is not None, "the token was inserted in this transaction"
    return stored


def get(transaction: Transaction, token: str) -> Token | None:
    """See `Store.get_token`."""
    row = transaction.one(sql.SELECT_TOKEN, (token,))
    return None if row is None else rows.token_from_row(row)


def all_tokens(transaction: Transaction) -> list[Token]:
    """See `Store.list_tokens`."""
    return [rows.token_from_row(row) for row in transaction.all(sql.SELECT_TOKENS)]


def revoke(transaction: Transaction, token: str) -> Token:
    """See `Store.revoke_token`."""
    transaction.run(sql.REVOKE_TOKEN, (transaction.now, token))
    stored = get(transaction, token)
    if stored is None:
        raise StoreError(f"there is no token {token!r}: list_tokens() says which there are")
    return stored
