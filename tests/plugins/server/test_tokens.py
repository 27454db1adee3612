"""`lightning token`: made once in plain text, listed without it, revoked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import seconds_of, with_store
from lightning.errors import ConfigError
from lightning.store.sqlite import SqliteStore
from lightning.store.url import sqlite_url
from lightning.types import Scope
from lightning_server.auth import Authenticator, Principal
from lightning_server.errors import ApiError
from lightning_server.tokens import Token, put_token

from tests.servers.control import ControlServer

Lightning = Callable[..., Any]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return sqlite_url(tmp_path / "lightning.db")


def who(url: str, plain: str) -> Principal:
    return asyncio.run(with_store(url, lambda store: Authenticator(store).principal(f"Bearer {plain}")))


def test_a_token_is_made_listed_and_revoked(lightning: Lightning, url: str, tmp_path: Path) -> None:
    made = lightning(
        "token", "create", "runner", "--store", url, "--project", "team-a", "--name", "lab", "--expires", "30d"
    )
    plain = made.out.strip()
    assert made.code == 0
    assert "runner of project team-a" in made.err
    assert who(url, plain) == Principal(plain.split("_")[1], "lab", Scope.RUNNER, "team-a")
    listed = lightning("token", "ls", "--store", str(tmp_path))
    assert plain.split("_")[1] in listed.out
    assert "valid" in listed.out
    assert plain.split("_", 2)[2] not in listed.out
    assert lightning("token", "revoke", plain, "--store", str(tmp_path)).code == 0
    with pytest.raises(ApiError, match="was revoked"):
        who(url, plain)
    (row,) = json.loads(lightning("token", "ls", "--store", url, "--json").out)
    assert row["state"] == "revoked"
    assert "digest" not in row


def test_a_time_that_no_calendar_has_is_still_listed(lightning: Lightning, url: str) -> None:
    token = Token("t1", Scope.VIEWER, "a" * 64, expires_at=1e18)
    asyncio.run(with_store(url, lambda store: put_token(store, token), make=True))
    listed = lightning("token", "ls", "--store", url)
    assert (listed.code, "t1" in listed.out) == (0, True)


def test_a_program_gets_one_document(lightning: Lightning, url: str) -> None:
    made = json.loads(lightning("token", "create", "admin", "--project", "*", "--store", url, "--json").out)
    assert made["state"] == "valid"
    assert who(url, made["token"]).project is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("viewer", "--project", "*"), "one project"),
        (("viewer", "--project", "a b"), "cannot name a project"),
        (("viewer", "--expires", "soon"), "no time"),
        (("viewer", "--expires", "0s"), "seconds"),
        (("viewer", "--expires", "9999999d"), "100 years"),
    ],
)
def test_impossible_tokens_are_refused_and_none_is_made(
    arguments: tuple[str, ...], said: str, lightning: Lightning, url: str
) -> None:
    refused = lightning("token", "create", *arguments, "--store", url)
    assert refused.code == 2
    assert said in refused.err
    assert refused.out == ""


def test_a_database_that_is_not_there_is_not_made_by_a_look(lightning: Lightning, tmp_path: Path) -> None:
    refused = lightning("token", "ls", "--store", str(tmp_path / "absent.db"))
    assert "no database" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_token_cannot_be_revoked(lightning: Lightning, url: str) -> None:
    lightning("token", "create", "viewer", "--store", url)
    refused = lightning("token", "revoke", "0123", "--store", url)
    assert (refused.code, "no token '0123'" in refused.err) == (2, True)


@pytest.mark.parametrize(("text", "value"), [("90d", 7_776_000.0), ("1.5h", 5400.0), ("2w", 1_209_600.0), ("5s", 5.0)])
def test_times_are_read(text: str, value: float) -> None:
    assert seconds_of(text, "time") == value


@pytest.mark.parametrize("text", ["", "5", "d", "-1d", "1y", "1d2h"])
def test_what_is_no_time_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="no time"):
        seconds_of(text, "time")


def test_tokens_are_made_through_a_server(
    lightning: Lightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ControlServer() as server:
        place, admin = server.add(SqliteStore(tmp_path / "served.db"))
        monkeypatch.setenv("LIGHTNING_TOKEN", admin)
        made = lightning("token", "create", "viewer", "--store", place)
        assert made.code == 0, made.err
        identity = made.out.split("_")[1]
        assert identity in lightning("token", "ls", "--store", place).out
        assert lightning("token", "revoke", identity, "--store", place).code == 0
        monkeypatch.setenv("LIGHTNING_TOKEN", made.out.strip())
        refused = lightning("token", "ls", "--store", place)
    assert (refused.code, "revoked" in refused.err) == (2, True)
