"""What the operations on tokens promise, for every store."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from lightning.errors import ConflictError, StoreError
from lightning.store import Store
from lightning.store.sqlite import SqliteStore
from lightning.types import Scope
from lightning_server import tokens_sql
from lightning_server.auth import issue_token
from lightning_server.tokens import TOKENS, Token, get_token, list_tokens, put_token, revoke_token

from tests.core.store.backends import everywhere


@everywhere
async def test_tokens_are_kept_and_revoked_for_good(store: Store) -> None:
    made = await put_token(store, Token("t1", Scope.RUNNER, "ab" * 32, name="laptop", expires_at=5e9))
    assert made.created_at > 0
    assert await get_token(store, "t1") == made
    with pytest.raises(ConflictError):
        await put_token(store, Token("t1", Scope.ADMIN, "cd" * 32))
    revoked = await revoke_token(store, "t1")
    assert revoked.revoked_at is not None
    assert await revoke_token(store, "t1") == revoked
    assert await list_tokens(store) == [revoked]
    with pytest.raises(StoreError, match="no token"):
        await revoke_token(store, "t2")


@everywhere
async def test_a_token_that_comes_again_under_its_id_is_made_once(store: Store) -> None:
    token = Token("t", Scope.RUNNER, "d" * 64)
    assert await put_token(store, token, once="1") == await put_token(store, token, once="1")
    with pytest.raises(ConflictError):
        await put_token(store, token, once="2")


def test_an_sql_database_has_a_function_with_the_arguments_of_each_operation() -> None:
    functions = tokens_sql.PART.functions
    assert set(functions) == {operation.name for operation in TOKENS.operations}
    for operation in TOKENS.operations:
        found = list(inspect.signature(functions[operation.name]).parameters)[1:]
        assert found == list(operation.signature.parameters), operation


async def test_the_table_has_a_column_for_each_field(sqlite: SqliteStore) -> None:
    await put_token(sqlite, issue_token(Scope.RUNNER, "mine")[0])
    found = await sqlite._read(lambda tx: tx.all("PRAGMA table_info(tokens)"))
    assert set(tokens_sql.COLUMNS.columns) <= {row[1] for row in found}
    assert set(tokens_sql.COLUMNS.fields) <= {field.name for field in fields(Token)}
