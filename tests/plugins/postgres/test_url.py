"""PostgreSQL URLs: what they say, what is refused, and that no password comes out again."""

from __future__ import annotations

import re
import sys
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import ConfigError, MissingExtraError
from lightning.installation import install_command
from lightning.plugins import plugins
from lightning_postgres.settings import Settings, from_url
from lightning_postgres.store import PostgresStore


def test_every_part_of_a_url_is_heard() -> None:
    url = "postgresql://me:p%40s%2Fs@db.example:6543/agents?schema=team_a&pool=3&timeout=2.5&ssl=require&ca=/etc/ca.pem"
    assert from_url(url) == Settings(
        host="db.example",
        port=6543,
        database="agents",
        user="me",
        password="p@s/s",
        schema="team_a",
        pool=3,
        timeout=2.5,
        ssl="require",
        ca="/etc/ca.pem",
    )
    assert from_url("postgres://[::1]/db") == Settings(host="::1", database="db")
    assert from_url("postgresql:///db?host=/run/postgresql") == Settings(host="/run/postgresql", database="db")


@given(user=st.text(min_size=1), password=st.text())
def test_any_user_and_password_survive_their_url_and_are_shown_nowhere(user: str, password: str) -> None:
    url = f"postgresql://{quote(user, safe='', errors='replace')}:{quote('pw ' + password, safe='', errors='replace')}@h/db"
    settings = from_url(url)
    assert settings.user == user.encode(errors="replace").decode()
    assert settings.password == "pw " + password.encode(errors="replace").decode()
    assert "pw " not in repr(settings)
    assert repr(PostgresStore.from_url(url)) == "PostgresStore('postgresql://h:5432/db?schema=lightning')"


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("host", "names no database"),
        ("host/a/b", "names no database"),
        ("host:x/db", "no port that could be"),
        ("host:70000/db", "no port that could be"),
        ("host/db?schema=Upper", "cannot name a schema"),
        ("host/db?schema=pg_catalog", "cannot name a schema"),
        ("host/db?schema=a;drop", "cannot name a schema"),
        ("host/db?pool=0", "between 1 and 500"),
        ("host/db?pool=many", "must be a whole number"),
        ("host/db?pool=nan", "must be a whole number"),
        ("host/db?timeout=soon", "must be a number"),
        ("host/db?timeout=0", "seconds between 0 and 3600"),
        ("host/db?timeout=nan", "seconds between 0 and 3600"),
        ("host/db?ssl=maybe", "verify-full"),
        ("host/db?shema=x", "did you mean 'schema'"),
        ("host/db?host=relative", "folder of a Unix socket"),
        ("host/db?pool", "malformed"),
    ],
)
def test_urls_that_cannot_be_meant_are_refused(rest: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        PostgresStore.from_url(f"postgresql://me:secret@{rest}")
    assert "secret" not in str(caught.value)


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lightning_postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("postgres"))):
        plugins().store("postgresql://host/db")
