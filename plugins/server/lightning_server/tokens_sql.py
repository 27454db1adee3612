"""Tokens in SQL databases, in one table.

The invariant: it keeps what `lightning_server.tokens` promises: a token is never deleted, and a revoked one stays revoked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning.errors import ConflictError, StoreError
from lightning.store import rollout_state, rows
from lightning.store.relational.transaction import SqlPart, Transaction, done_once

from lightning_server.tokens import Token

TABLE: Final = """CREATE TABLE tokens (
    n INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    digest TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
)"""
COLUMNS: Final = rows.Columns(Token, "token {_.id!r}", forms={"name": rows.PLAIN})
_PLACES: Final = ", ".join("?" for _ in COLUMNS.columns)
INSERT: Final = f"INSERT INTO tokens ({COLUMNS.names()}) VALUES ({_PLACES}) ON CONFLICT (id) DO NOTHING"  # noqa: S608
SELECT: Final = f"SELECT {COLUMNS.names()} FROM tokens WHERE id = ?"  # noqa: S608
SELECT_ALL: Final = f"SELECT {COLUMNS.names()} FROM tokens ORDER BY n"  # noqa: S608
REVOKE: Final = "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"


async def put(transaction: Transaction, token: Token, once: str) -> Token:
    """Store a token, created now if it has no time. Raises `ConflictError` when its id is taken."""
    known_as = rollout_state.known_as(once, "put_token", token.id, token.digest, token.scope.value, token.project)
    await done_once(transaction, known_as, "", lambda: _insert(transaction, token))
    stored = await get(transaction, token.id)
    assert stored is not None, "a token is never deleted"
    return stored


async def _insert(transaction: Transaction, token: Token) -> None:
    created = replace(token, created_at=token.created_at or await transaction.now())
    if not await transaction.run(INSERT, COLUMNS.values(created)):
        raise ConflictError(f"there is a token {token.id!r} already: make one with another id")


async def get(transaction: Transaction, token: str) -> Token | None:
    """Return the token with this id, None when there never was one."""
    row = await transaction.one(SELECT, (token,))
    return None if row is None else COLUMNS.read(row)


async def every(transaction: Transaction) -> list[Token]:
    """Return all tokens, oldest first."""
    return [COLUMNS.read(row) for row in await transaction.all(SELECT_ALL)]


async def revoke(transaction: Transaction, token: str) -> Token:
    """Revoke a token for good. Raises `StoreError` for an unknown id."""
    await transaction.run(REVOKE, (await transaction.now(), token))
    stored = await get(transaction, token)
    if stored is None:
        raise StoreError(f"there is no token {token!r}: list_tokens() says which there are")
    return stored


PART: Final = SqlPart(
    reads={"get_token": get, "list_tokens": every},
    writes={"put_token": put, "revoke_token": revoke},
    tables=((TABLE,),),
)
