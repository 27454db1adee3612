from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pluggy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning import hooks
from lightning.errors import ConfigError, SchemaError
from lightning.plugins import plugins
from lightning.store import Store, StoreURL, parse, plugin, sqlite_url
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.store.url import redacted, split_userinfo


@pytest.fixture
def factories() -> dict[str, Callable[[str], Store]]:
    """What the plugin registers, through the real hooks."""
    manager = pluggy.PluginManager("lightning")
    manager.add_hookspecs(hooks)
    manager.register(plugin)
    manager.check_pending()
    found: dict[str, Callable[[str], Store]] = {}
    manager.hook.register_stores(register=found.__setitem__)
    return found


def test_the_plugin_makes_stores_from_urls(factories: dict[str, Callable[[str], Store]]) -> None:
    assert set(factories) == {"memory", "sqlite"}, "the others are plugins"
    assert isinstance(factories["memory"]("memory://"), MemoryStore)
    assert repr(factories["sqlite"]("sqlite:////data/x.db?sync=full")) == "SqliteStore('/data/x.db')"
    assert repr(factories["sqlite"]("sqlite:///runs/x.db")) == f"SqliteStore({str(Path('runs/x.db').absolute())!r})"


def test_the_room_imports_no_database() -> None:
    script = "import sys, lightning.store.plugin; assert not {'sqlite3', 'zstandard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda p: p != ":memory:"))
def test_any_path_survives_its_url(path: str) -> None:
    assert parse(sqlite_url(path)).path == path
    assert repr(SqliteStore.from_url(sqlite_url(path, sync="full"))) == f"SqliteStore({str(Path(path).absolute())!r})"


def test_urls_are_taken_apart() -> None:
    assert parse("postgres://user@host:5432/db?pool=4&ssl=on") == StoreURL(
        "postgres", "user@host:5432", "db", {"pool": "4", "ssl": "on"}
    )
    assert parse("memory://") == StoreURL("memory")
    assert sqlite_url(Path("/tmp/a b?.db")) == "sqlite:////tmp/a%20b%3F.db"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("store.db", "not a store URL"),
        ("://x", "not a store URL"),
        ("sqlite:///x.db?sync", "malformed"),
        ("sqlite:///x.db?sync=full&sync=normal", "twice"),
        ("sqlite:///x.db?synk=full", "did you mean 'sync'"),
        ("sqlite:///x.db?sync=never", "normal or full"),
        ("sqlite:///x.db?busy_timeout=soon", "number of seconds"),
        ("sqlite:///x.db?busy_timeout=nan", "between 0 and 3600"),
        ("sqlite://", "names no file"),
        ("sqlite://x.db", "three slashes"),
        ("sqlite:///:memory:", "memory://"),
        ("memory://name", "cannot be shared"),
        ("memory://?sync=full", "unknown option"),
    ],
)
def test_urls_that_cannot_be_meant_are_refused(url: str, words: str) -> None:
    make = MemoryStore.from_url if url.startswith("memory") else SqliteStore.from_url
    with pytest.raises(ConfigError, match=words):
        make(url)


@pytest.mark.parametrize(
    ("url", "userinfo", "shown"),
    [
        ("postgresql://host/db", "", "postgresql://host/db"),
        ("postgresql://me:p%40ss@host/db", "me:p%40ss", "postgresql://***@host/db"),
        ("redis://:p@ss@host", ":p@ss", "redis://***@host"),
        ("redis://host/0?prefix=a@b", "", "redis://***@b"),
        ("sqlite:///runs@home/x.db", "", "sqlite:///runs@home/x.db"),
        ("runs@home/x.db", "", "runs@home/x.db"),
        ("postgresql://me:hun/ter2@db:5432/l", "", "postgresql://***@db:5432/l"),
        ("postgresql://me:hun?ter2@db:5432/l", "", "postgresql://***@db:5432/l"),
        ("postgresql://me:h@n/ter2@db/l", "me:h", "postgresql://***@db/l"),
        ("postgresql://host/db?password=hun@ter2", "", "postgresql://***"),
        ("postgresql:/me:hunter2@db/l", "", "***@db/l"),
    ],
)
def test_what_a_url_shows_has_no_password(url: str, userinfo: str, shown: str) -> None:
    assert split_userinfo(url)[0] == userinfo
    assert redacted(url) == shown


@given(st.lists(st.sampled_from(["hunter2", *"/?#@:&=%", "?password=", "&token=", "://"]), min_size=1))
def test_whatever_a_password_has_in_it_is_not_shown(pieces: list[str]) -> None:
    assert "hunter2" not in redacted(f"postgresql://me:{''.join(pieces)}@db/l")


@pytest.mark.parametrize("scheme", ["postgresql", "redis", "http"])
@pytest.mark.parametrize(
    "password", ["hun/ter2", "12/ter2", "hun?ter2", "hun?ter2=x", "/ter2", "h@n/ter2", "h?schema=ter2"]
)
def test_a_password_that_is_not_quoted_is_refused_and_not_shown(scheme: str, password: str) -> None:
    url = f"{scheme}://me:{password}@db:5432/0"
    for make in (parse, plugins().store):
        with pytest.raises(ConfigError) as caught:
            make(url)
        assert "ter2" not in str(caught.value)
        assert "%2F for a / of the password, %3F for a ?" in str(caught.value) or scheme == "http"


def test_errors_about_urls_hold_no_password() -> None:
    for url in ("postgresql://me:secret@host/db?pool", "postgresql://me:secret@host/db?pool=1&pool=2"):
        with pytest.raises(ConfigError) as caught:
            parse(url)
        assert "secret" not in str(caught.value)


async def test_a_store_that_is_not_there_is_not_made_unless_it_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no database at"):
        await SqliteStore(tmp_path / "runs" / "x.db").open(make=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.db").touch()
    with pytest.raises(SchemaError, match="is empty: a store is made in it by whoever writes first"):
        await SqliteStore(tmp_path / "x.db").open(make=False)
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("x.db", 0)]
    for make in (True, False):
        store = SqliteStore(tmp_path / "x.db")
        await store.open(make=make)
        assert await store.list_runs() == []
        await store.close()
    memory = MemoryStore()
    await memory.open(make=False)
    await memory.close()
