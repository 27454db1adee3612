"""Scoped tokens: who gets in, and what is kept of a secret."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.errors import DataError, StoreError
from lightning.gateway.identity import TokenSigner
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.types import Scope
from lightning_server import auth
from lightning_server.auth import Authenticator, Principal, digest_of, issue_token
from lightning_server.errors import ApiError
from lightning_server.tokens import Token, put_token, revoke_token


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()


async def kept(store: Store, scope: Scope = Scope.RUNNER, **changes: object) -> str:
    """The plain text of a new token that is in the store."""
    token, plain = issue_token(scope)
    await put_token(store, replace(token, **changes))
    return plain


async def refusal(store: Store, authorization: str) -> tuple[int, str]:
    with pytest.raises(ApiError) as refused:
        await Authenticator(store).principal(authorization)
    assert "lightning token create" in refused.value.message or refused.value.type == "missing_token"
    return refused.value.status, refused.value.type


async def test_the_holder_of_a_token_gets_in(store: Store) -> None:
    token, plain = issue_token(Scope.TRAINER, "team-a", "the night's training", ttl=60.0)
    await put_token(store, token)
    principal = await Authenticator(store).principal(f"Bearer {plain}")
    assert principal == Principal(token.id, "the night's training", Scope.TRAINER, "team-a")


async def test_an_admin_of_all_projects_is_bound_to_none(store: Store) -> None:
    token, plain = issue_token(Scope.ADMIN, "*")
    await put_token(store, token)
    assert (await Authenticator(store).principal(f"bearer {plain}")).project is None


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic bHQ6eA==",
        "Bearer lt_",
        "Bearer lt_0123456789abcdef_short",
        f"Bearer lt_0123456789abcdef_{'A' * 43}",
        f"Bearer lt_{'0' * 16}_{'A' * 42}\0",
        f"Bearer lt_' OR '1'='1_{'A' * 43}",
        "Bearer " + "x" * 100_000,
        f"Bearer lt_0123456789abcdef_{'Ä' * 43}",
    ],
)
async def test_what_is_no_token_is_refused(sent: str, store: Store) -> None:
    await kept(store)
    status, kind = await refusal(store, sent)
    assert (status, kind) in {(401, "missing_token"), (401, "invalid_token")}


async def test_the_agents_key_of_a_rollout_is_no_token(store: Store) -> None:
    key = TokenSigner(b"s" * 32).issue("rollout", 1, 60.0)
    with pytest.raises(ApiError, match="calls the model and nothing else"):
        await Authenticator(store).principal(f"Bearer {key}")


async def test_a_forged_secret_is_told_nothing_of_the_token(store: Store) -> None:
    plain = await kept(store, revoked_at=1.0)
    forged = plain[:-1] + ("A" if plain[-1] != "A" else "B")
    unknown = f"lt_{'0' * 16}_{plain.rpartition('_')[2]:A<43}"[:63]
    said = []
    for sent in (forged, unknown):
        with pytest.raises(ApiError) as refused:
            await Authenticator(store).principal(f"Bearer {sent}")
        said.append((refused.value.status, refused.value.type, refused.value.message))
    assert said[0] == said[1]
    assert await refusal(store, f"Bearer {plain}") == (401, "revoked_token")


async def test_a_token_ends_when_its_time_is_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await refusal(store, f"Bearer {await kept(store, expires_at=time.time() - 1)}") == (401, "expired_token")
    token, plain = issue_token(Scope.VIEWER, ttl=60.0)
    await put_token(store, token)
    gate = Authenticator(store)
    await gate.principal(f"Bearer {plain}")
    over = time.time() + 60.0
    monkeypatch.setattr(time, "time", lambda: over)
    with pytest.raises(ApiError, match="expired"):  # the cache knows when, too
        await gate.principal(f"Bearer {plain}")


async def test_a_revoked_token_is_refused_by_every_server_within_a_second(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await kept(store)
    servers = [Authenticator(store), Authenticator(store)]
    for server in servers:
        await server.principal(f"Bearer {plain}")
    await revoke_token(store, plain.split("_")[1])
    clock = time.monotonic
    assert auth.CACHE_SECONDS <= 1.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + auth.CACHE_SECONDS)
    for server in servers:
        with pytest.raises(ApiError, match="was revoked"):
            await server.principal(f"Bearer {plain}")


async def test_a_flood_of_unknown_tokens_is_not_remembered(store: Store) -> None:
    gate = Authenticator(store)
    for number in range(50):
        with pytest.raises(ApiError):
            await gate.principal(f"Bearer lt_{number:016x}_{'A' * 43}")
    assert len(gate._known) == 0


async def test_many_tokens_do_not_fill_the_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "CACHED", 3)
    gate = Authenticator(store)
    for _ in range(6):
        await gate.principal(f"Bearer {await kept(store)}")
    assert len(gate._known) == 3


async def test_a_store_that_is_away_is_no_refusal(store: Store) -> None:
    plain = await kept(store)
    await store.close()
    with pytest.raises(StoreError):
        await Authenticator(store).principal(f"Bearer {plain}")


async def test_no_secret_is_kept_logged_or_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = SqliteStore(tmp_path / "tokens.db")
    await store.open()
    token, plain = issue_token(Scope.ADMIN)
    secret = plain.split("_", 2)[2]
    await put_token(store, token)
    await Authenticator(store).principal(f"Bearer {plain}")
    with pytest.raises(ApiError) as refused:
        await Authenticator(store).principal(f"Bearer {plain}x")
    await store.close()
    assert secret not in caplog.text + refused.value.message + repr(token)
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert token.id.encode() in written, "the file was looked at before it was written"
    assert secret.encode() not in written
    assert digest_of(secret) == token.digest


@pytest.mark.parametrize("scope", list(Scope))
def test_a_scope_is_what_it_says(scope: Scope) -> None:
    holder = Principal("id", "", scope, "default")
    for needed in Scope:
        if scope in (Scope.ADMIN, needed):
            holder.require(needed)
        else:
            with pytest.raises(ApiError, match=f"has the scope '{scope.value}'; this needs {needed.value}") as refused:
                holder.require(needed)
            assert refused.value.status == 403
    holder.require(*Scope)


def test_only_an_admin_is_for_all_projects() -> None:
    for scope in set(Scope) - {Scope.ADMIN}:
        with pytest.raises(DataError, match="one project"):
            issue_token(scope, "*")


@pytest.mark.parametrize("project", ["", " ", "a b", "../x", "a\0", "x" * 65, "a::b", ".hidden", "ä"])
def test_impossible_projects_are_refused(project: str) -> None:
    with pytest.raises(DataError, match="cannot name a project"):
        issue_token(Scope.VIEWER, project)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_lifetimes_are_refused(ttl: float) -> None:
    with pytest.raises(DataError, match="seconds"):
        issue_token(Scope.VIEWER, ttl=ttl)


def test_names_of_tokens_cannot_carry_lines() -> None:
    with pytest.raises(DataError, match="printable"):
        issue_token(Scope.VIEWER, name="a\nb")


def test_every_token_is_another() -> None:
    made = [issue_token(Scope.RUNNER) for _ in range(100)]
    assert len({token.id for token, _ in made}) == len({plain for _, plain in made}) == 100
    assert all(isinstance(token, Token) and len(plain) == 63 for token, plain in made)
