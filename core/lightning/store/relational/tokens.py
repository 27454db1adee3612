"""Tokens of the control API: kept by the digest of their secret, never deleted.

The invariant: a token that was revoked stays revoked.
"""

from __future__ import annotations

from lightning.errors import ConflictError, StoreError
from lightning.store import rows, sql
from lightning.store.relational.transaction import Transaction
from lightning.types import Token


async def put(transaction: Transaction, token: Token) -> Token:
    """See `Store.put_token`. A token without a time of its own is created now."""
    await transaction.alone(f"token {token.id}")
    values = (
        *rows.token_values(token),
        token.created_at or await transaction.now(),
        token.expires_at,
        token.revoked_at,
    )
    if not await transaction.run(sql.INSERT_TOKEN, values):
        raise ConflictError(f"there is a token {token.id!r} already: make one with another id")
    stored = await get(transaction, token.id)
    assert stored is not None, "the token was inserted in this transaction"
    return stored


async def put_again(transaction: Transaction, stored: Token, token: Token) -> Token:
    """`put` after a try that would have stored it so and whose end nobody heard of."""
    await transaction.alone(f"token {token.id}")  # waits for the earlier try, should it still be on its way
    return stored if await get(transaction, token.id) == stored else await put(transaction, token)


async def get(transaction: Transaction, token: str) -> Token | None:
    """See `Store.get_token`."""
    row = await transaction.one(sql.SELECT_TOKEN, (token,))
    return None if row is None else rows.token_from_row(row)


async def all_tokens(transaction: Transaction) -> list[Token]:
    """See `Store.list_tokens`."""
    return [rows.token_from_row(row) for row in await transaction.all(sql.SELECT_TOKENS)]


async def revoke(transaction: Transaction, token: str) -> Token:
    """See `Store.revoke_token`."""
    await transaction.run(sql.REVOKE_TOKEN, (await transaction.now(), token))
    stored = await get(transaction, token)
    if stored is None:
        raise StoreError(f"there is no token {token!r}: list_tokens() says which there are")
    return stored
