"""Nothing listens beyond this machine before a person has made a token."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.addresses import is_loopback
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.store import Store
from lightning.store.url import sqlite_url
from lightning.types import Scope
from lightning_server.auth import AUTOMATIC, check_exposure, issue_token
from lightning_server.config import ServerConfig
from lightning_server.control import on_server_port
from lightning_server.serving import serve_store
from lightning_server.tokens import put_token


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
async def test_loopback_needs_nobodys_decision(host: str, store: Store) -> None:
    await check_exposure(store, host)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "gpu-7.example", "localhost.example"])
async def test_a_public_bind_is_refused_without_a_token(host: str, store: Store) -> None:
    with pytest.raises(ConfigError, match=r"lightning token create admin --store sqlite:///x\.db") as refused:
        await check_exposure(store, host, place="sqlite:///x.db")
    assert "TLS" in str(refused.value)


async def test_a_token_that_a_person_made_is_a_decision(store: Store) -> None:
    token, _ = issue_token(Scope.RUNNER, name="the lab's runners")
    await put_token(store, token)
    await check_exposure(store, "0.0.0.0")


@pytest.mark.parametrize("changes", [{"name": AUTOMATIC}, {"revoked_at": 1.0}, {"expires_at": 1.0}])
async def test_a_servers_own_a_revoked_or_an_expired_token_is_none(changes: dict[str, object], store: Store) -> None:
    token, _ = issue_token(Scope.ADMIN)
    await put_token(store, replace(token, created_at=time.time(), **changes))
    with pytest.raises(ConfigError, match="nobody has made a token"):
        await check_exposure(store, "0.0.0.0")


def test_every_default_address_is_loopback() -> None:
    config = Config()
    for host in (config.gateway.host, ServerConfig.of(config).host, config.policy_server.host):
        assert is_loopback(host)


async def test_a_server_asks_before_it_listens(tmp_path: Path) -> None:
    url, config = sqlite_url(tmp_path / "a.db"), with_settings(Config(), {"server.host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="nobody has made a token"):
        async with serve_store(url, config, tmp_path):
            raise AssertionError("it listens")
    assert not list(tmp_path.glob("*-token")), "no token was made of its own accord"


@pytest.mark.parametrize("place", ["redis://:a@hunter2@h/0", "postgresql://h/db?user=u&password=hunter2&x=1"])
async def test_no_part_of_a_password_is_in_the_message(place: str, store: Store) -> None:
    with pytest.raises(ConfigError) as refused:
        await check_exposure(store, "0.0.0.0", place=place)
    assert "hunter2" not in str(refused.value)


async def test_the_database_password_is_no_part_of_the_message(store: Store) -> None:
    with pytest.raises(ConfigError) as refused:
        await check_exposure(store, "0.0.0.0", place="postgresql://me:hunter2@db:5432/lightning")
    assert "hunter2" not in str(refused.value)
    assert "postgresql://***@db:5432/lightning" in str(refused.value)


@pytest.mark.parametrize(
    ("host", "names"), [("127.0.0.1", ("a.example", "lightning.example")), ("0.0.0.0", ("a.example",))]
)
def test_a_proxy_before_loopback_may_pass_its_name_on(host: str, names: tuple[str, ...]) -> None:
    given = {
        "server.host": host,
        "server.public_url": "https://lightning.example:8443/x",
        "gateway.limits.hosts": ["a.example"],
    }
    assert on_server_port(with_settings(Config(), given)).gateway.limits.hosts == names
