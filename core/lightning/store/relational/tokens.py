"""Tokens of the control API: kept by the digest of their secret, never deleted.

The invariant: a token that was revoked stays revoked.
"""

from __future__ import annotations

from dataclasses import replace

from lightning.errors import ConflictError, StoreError
from lightning.store import rows, sql
from lightning.store.relational import idempotency
from lightning.store.relational.transaction import Transaction
from lightning.types import Token


async def put(transaction: Transaction, token: Token, known_as: str) -> Token:
    """See `Store.put_token`. A token without a time of its own is created now."""
    await idempotency.once(transaction, known_as, "", lambda: _insert(transaction, token))
    stored = await get(transaction, token.id)
    assert stored is not None, "a token is never deleted"
    return stored


async def _insert(transaction: Transaction, token: Token) -> None:
    created = replace(token, created_at=token.created_at or await transaction.now())
    if not await transaction.run(sql.INSERT_TOKEN, rows.TOKENS.values(created)):
        raise ConflictError(f"there is a token {token.id!r} already: make one with another id")


async def get(transaction: Transaction, token: str) -> Token | None:
    """See `Store.get_token`."""
    row = await transaction.one(sql.SELECT_TOKEN, (token,))
    return None if row is None else rows.TOKENS.read(row)


async def all_tokens(transaction: Transaction) -> list[Token]:
    """See `Store.list_tokens`."""
    return [rows.TOKENS.read(row) for row in await transaction.all(sql.SELECT_TOKENS)]


async def revoke(transaction: Transaction, token: str) -> Token:
    """See `Store.revoke_token`."""
    await transaction.run(sql.REVOKE_TOKEN, (await transaction.now(), token))
    stored = await get(transaction, token)
    if stored is None:
        raise StoreError(f"there is no token {token!r}: list_tokens() says which there are")
    return stored
