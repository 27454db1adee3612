"""A port opened to clients: the first tokens, and what refuses to open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, UnavailableError
from lightning.plugins import plugins
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.store.url import sqlite_url
from lightning.types import Scope
from lightning_server import control
from lightning_server.auth import ALL_PROJECTS, AUTOMATIC, Authenticator
from lightning_server.control import first_admin_token, runner_token
from lightning_server.serving import serve_store
from lightning_server.tokens import Token, list_tokens, revoke_token


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


async def test_the_first_admin_token_is_made_once_for_its_owner_s_eyes(store: MemoryStore, tmp_path: Path) -> None:
    file = await first_admin_token(store, tmp_path / "new")
    assert file is not None
    assert file.stat().st_mode & 0o777 == 0o600
    principal = await Authenticator(store).principal(f"Bearer {file.read_text().strip()}")
    assert (principal.scope, principal.project, principal.name) == (Scope.ADMIN, None, AUTOMATIC)
    assert await first_admin_token(store, tmp_path) is None
    (token,) = await list_tokens(store)
    assert token.project == ALL_PROJECTS
    await revoke_token(store, token.id)
    assert await first_admin_token(store, tmp_path / "new") is not None, "one that opens nothing does not count"


async def test_a_runner_s_token_is_kept_as_long_as_it_is_good(store: MemoryStore, tmp_path: Path) -> None:
    file, first = await runner_token(store, tmp_path)
    file.chmod(0o644)
    assert await runner_token(store, tmp_path) == (file, first)
    (token,) = await list_tokens(store)
    assert (token.scope, token.project) == (Scope.RUNNER, "default")
    await revoke_token(store, token.id)
    file, second = await runner_token(store, tmp_path)
    assert second != first
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("nonsense")
    assert (await runner_token(store, tmp_path))[1] not in (first, second)


async def test_a_runner_s_token_is_of_the_project_that_was_asked_for(store: MemoryStore, tmp_path: Path) -> None:
    file, default = await runner_token(store, tmp_path)
    _, team = await runner_token(store, tmp_path, "team-a", only=True)
    assert team != default
    assert await runner_token(store, tmp_path, "team-a", only=True) == (file, team)
    principal = await Authenticator(store).principal(f"Bearer {team}")
    assert (principal.scope, principal.project) == (Scope.RUNNER, "team-a")
    for project in ("default", "team-b"):
        assert await runner_token(store, tmp_path, project) == (file, team), "a server leaves a trainer's"
    assert (await runner_token(store, tmp_path, only=True))[1] not in (default, team)


async def test_a_server_makes_its_first_runner_token_for_the_project_of_the_settings(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "shared.db")
    async with serve_store(url, with_settings(Config(), {"trainer.project": "team-a"}), tmp_path) as server:
        (token,) = (token for token in await list_tokens(server.store) if token.scope is Scope.RUNNER)
        assert token.project == "team-a"
    for project in ("default", "team-b"):
        async with serve_store(url, with_settings(Config(), {"trainer.project": project}), tmp_path) as server:
            assert [token.scope for token in await list_tokens(server.store)].count(Scope.RUNNER) == 1
    with pytest.raises(ConfigError, match=r"^trainer\.project: 'a b' cannot name a project"):
        async with serve_store(url, with_settings(Config(), {"trainer.project": "a b"}), tmp_path):
            pass


async def test_a_token_that_cannot_be_written_is_not_made(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the first admin token cannot be written to"):
        await first_admin_token(store, tmp_path / "file")
    assert await list_tokens(store) == []


async def test_a_second_database_s_server_in_the_folder_keeps_the_first_one_s_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (sqlite_url(tmp_path / name) for name in ("first.db", "second.db"))
    async with serve_store(first, Config(), tmp_path):
        kept = {name: (tmp_path / name).read_text() for name in ("admin-token", "runner-token")}
        (tmp_path / "admin-token").chmod(0o644)
        assert not caplog.records
        async with serve_store(second, Config(), tmp_path) as server:
            assert (server.admin_file, server.runner_file) == (tmp_path / "admin-token", tmp_path / "runner-token")
    aside = {name: tmp_path / f"{name}.{plain.split('_')[1]}" for name, plain in kept.items()}
    assert {name: file.read_text() for name, file in aside.items()} == kept
    assert {file.stat().st_mode & 0o777 for file in aside.values()} == {0o600}
    assert [record.args for record in caplog.records] == [(tmp_path / name, file) for name, file in aside.items()]
    assert "give each database a folder of its own with --out" in caplog.text
    files = set(tmp_path.glob("*-token*"))
    for url, runner in ((first, aside["runner-token"]), (second, tmp_path / "runner-token")):
        async with serve_store(url, Config(), tmp_path) as server:
            assert (server.admin_file, server.runner_file) == (None, runner)
    assert set(tmp_path.glob("*-token*")) == files, "starting them in turn leaves no more"


async def test_stores_in_memory_have_files_of_their_own_and_replace_them(tmp_path: Path) -> None:
    async with serve_store(sqlite_url(tmp_path / "kept.db"), Config(), tmp_path):
        kept = {file: file.read_text() for file in tmp_path.glob("*-token")}
    plains = set()
    for _ in range(2):
        async with serve_store("memory://", Config(), tmp_path) as server:
            assert server.admin_file == tmp_path / "admin-token.memory"
            assert server.runner_file == tmp_path / "runner-token.memory"
            plains |= {server.admin_file.read_text(), server.runner_file.read_text()}
    assert len(plains) == 4
    assert {file: file.read_text() for file in kept} == kept
    assert len(list(tmp_path.glob("*-token*"))) == len(kept) + 2


async def test_a_token_of_the_same_database_is_replaced_and_not_kept(tmp_path: Path) -> None:
    store = plugins().store(sqlite_url(tmp_path / "shared.db"))
    await store.open()
    file, _ = await runner_token(store, tmp_path)
    assert await runner_token(store, tmp_path, "team-a", only=True) == (file, file.read_text().strip())
    assert list(tmp_path.glob("*-token*")) == [file]
    await store.close()


async def test_a_token_that_the_store_does_not_take_leaves_the_folder_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_store(sqlite_url(tmp_path / "first.db"), Config(), tmp_path):
        kept = {file: file.read_text() for file in tmp_path.glob("*-token*")}
    store = plugins().store(sqlite_url(tmp_path / "second.db"))
    await store.open()

    async def away(store: Store, token: Token) -> None:
        raise UnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(control, "put_token", away)
        for folder in (tmp_path, tmp_path / "empty"):
            with pytest.raises(UnavailableError, match="away"):
                await runner_token(store, folder)
    assert {file: file.read_text() for file in tmp_path.glob("*-token*")} == kept
    assert list((tmp_path / "empty").iterdir()) == []
    assert not caplog.records
    await store.close()


async def test_servers_over_one_database_are_one(tmp_path: Path) -> None:
    url, config = sqlite_url(tmp_path / "shared.db"), Config()
    async with serve_store(url, config, tmp_path) as one, serve_store(url, config, tmp_path) as other:
        assert one.admin_file == tmp_path / "admin-token"
        assert other.admin_file is None
        assert one.runner_file == other.runner_file == tmp_path / "runner-token"
        headers = {"authorization": f"Bearer {(tmp_path / 'admin-token').read_text().strip()}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{one.url}/api/v1/runs", json={"id": "run", "name": "made there"}) as reply:
                assert reply.status == 200
            async with session.get(f"{other.url}/api/v1/runs/run") as reply:
                assert (await reply.json())["name"] == "made there"


async def test_a_server_is_not_served_and_the_world_is_not_let_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 is a server"):
        async with serve_store("http://127.0.0.1:1", Config(), tmp_path):
            pass
    everywhere = with_settings(Config(), {"server.host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"will not listen on 0\.0\.0\.0"):
        async with serve_store(sqlite_url(tmp_path / "shared.db"), everywhere, tmp_path):
            pass
