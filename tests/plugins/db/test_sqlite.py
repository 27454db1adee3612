"""Looking at an SQLite file, copying it while it is written, and removing from it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import ConfigError, PluginError, SchemaError, StoreError
from lightning.plugins import Plugins
from lightning.store.schema import SCHEMA
from lightning.store.sqlite import SqliteStore
from lightning.store.url import sqlite_url
from lightning.types import Outcome, Rollout, Run, Task, Transition, logprobs, token_ids
from lightning_db import keeper, queries, relational
from lightning_db.keeper import Weight, count_tokens, keeper_of
from lightning_otel.traces.store import spans
from lightning_resources.operations import list_resources
from lightning_server.tokens import list_tokens

from tests.plugins.db.gateways import check_state_of_gateways


def rows(path: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def content(path: Path) -> dict[str, Any]:
    """All that a store says of its run."""
    store = SqliteStore(path)
    await store.open()
    page = await store.list_rollouts("run")
    found = {
        "runs": await store.list_runs(),
        "rollouts": page.items,
        "calls": [await store.transitions(rollout.id) for rollout in page.items],
        "events": [list((await store.attempts_of([(rollout.id, None)]))[0].tool_events) for rollout in page.items],
        "extras": [list((await store.attempts_of([(rollout.id, None)]))[0].extras.items()) for rollout in page.items],
        "spans": [await spans(store, rollout.id) for rollout in page.items],
        "steps": await store.steps("run"),
        "resources": await list_resources(store),
        "tokens": await list_tokens(store),
        "state": await store.get_state("run", "note"),
    }
    await store.close()
    return found


# status ---------------------------------------------------------------------------------------------------------


async def test_status_counts_what_is_there(database: Path) -> None:
    found = await keeper_of(sqlite_url(database)).status()
    assert found.schema == SCHEMA
    assert (found.runs, found.steps, found.resources) == (1, 2, 2)
    assert found.rollouts == {"succeeded": 9, "failed": 1}
    assert (found.calls, found.spans) == (20, 10)
    assert found.tokens == {"active": 1, "expired": 1, "revoked": 0}
    assert found.bytes == database.stat().st_size
    assert found.oldest == 1000.0
    assert found.newest is not None
    assert found.newest > 1e9


async def test_another_schema_a_foreign_and_a_missing_file_are_refused(tmp_path: Path, database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("UPDATE schema_version SET version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(
        SchemaError, match=f"has schema 99, but this version of lightning works with schema {SCHEMA} only"
    ):
        await keeper_of(sqlite_url(database)).status()
    with pytest.raises(ConfigError, match="no database at"):
        await keeper_of(sqlite_url(tmp_path / "none.db")).status()
    (tmp_path / "text.db").write_text("not a database" * 100)
    with pytest.raises(SchemaError, match="corrupt"):
        await keeper_of(sqlite_url(tmp_path / "text.db")).status()


@pytest.mark.parametrize("version", ["0", "-1", "NULL", "'x'"])
async def test_a_database_with_tables_is_not_called_empty(database: Path, version: str) -> None:
    connection = sqlite3.connect(database)
    connection.executescript(
        f"DROP TABLE schema_version; CREATE TABLE schema_version (version); "
        f"INSERT INTO schema_version VALUES ({version})"
    )
    connection.close()
    for act in (keeper_of(sqlite_url(database)).status, lambda: SqliteStore(database).open(make=False)):
        with pytest.raises(SchemaError, match=r"has a damaged schema version .*: restore it from a backup"):
            await act()


@pytest.mark.parametrize("url", ["http://host:1", "https://host", "memory://"])
def test_what_has_no_database_has_no_keeper(url: str) -> None:
    with pytest.raises(ConfigError, match="database"):
        keeper_of(url)


def test_tokens_are_counted_by_what_they_are_now() -> None:
    tokens = [(None, None), (20.0, None), (10.0, None), (5.0, 1.0), (None, 1.0)]
    assert count_tokens(tokens, 10.0) == {"active": 2, "expired": 1, "revoked": 2}


# backup and restore ---------------------------------------------------------------------------------------------


async def test_a_backup_is_a_store_with_the_same_content(database: Path, tmp_path: Path) -> None:
    keeper = keeper_of(sqlite_url(database))
    await keeper.backup(tmp_path / "deep" / "backup.db")
    assert await content(tmp_path / "deep" / "backup.db") == await content(database)
    with pytest.raises(StoreError, match="exists already"):
        await keeper.backup(tmp_path / "deep" / "backup.db")
    await keeper_of(sqlite_url(tmp_path / "new.db")).restore(tmp_path / "deep" / "backup.db")
    assert await content(tmp_path / "new.db") == await content(database)
    with pytest.raises(StoreError, match="exists already"):
        await keeper_of(sqlite_url(tmp_path / "new.db")).restore(database)


async def test_a_backup_that_cannot_be_written_leaves_nothing(database: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        await keeper_of(sqlite_url(database)).backup(tmp_path / "file" / "backup.db")
    damaged = bytearray(database.read_bytes())
    damaged[-3 * 16384 : -16384] = bytes(2 * 16384)
    (tmp_path / "damaged.db").write_bytes(damaged)
    with pytest.raises(SchemaError, match=r"damaged|corrupt"):
        await keeper_of(sqlite_url(tmp_path / "damaged.db")).backup(tmp_path / "backup.db")
    assert {file.name for file in tmp_path.iterdir()} == {"file", "damaged.db", "store.db"}


async def test_a_backup_while_a_run_writes_is_one_moment_of_it(tmp_path: Path) -> None:
    """Writes are numbered; a copy has the first so many of them, and the writer never waits for it to end."""
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    await store.open()
    await store.put_run(Run("run", "run"))
    stop, written = threading.Event(), 0

    async def write() -> None:
        nonlocal written
        while not stop.is_set():
            await store.create_rollouts([Rollout(f"{written:05d}", "run", Task("q"), "g")])
            await store.log_metrics("run", written, {"n": float(written)})
            written += 1

    writing = asyncio.create_task(write())
    for number in range(3):
        await asyncio.sleep(0.02)
        before = written
        await keeper_of(sqlite_url(path)).backup(tmp_path / f"{number}.db")
        copied = [row[0] for row in rows(tmp_path / f"{number}.db", "SELECT id FROM rollouts ORDER BY n")]
        points = [row[0] for row in rows(tmp_path / f"{number}.db", "SELECT step FROM metrics ORDER BY step")]
        assert copied == [f"{place:05d}" for place in range(len(copied))]
        assert points == list(range(len(points)))
        assert len(copied) - 1 <= len(points) <= len(copied)
        assert before <= len(copied) <= written + 1
    stop.set()
    await writing
    await store.close()


# removing -------------------------------------------------------------------------------------------------------


async def test_calls_go_with_their_whole_group_and_siblings_of_others_stay(database: Path) -> None:
    before = await content(database)
    keeper = keeper_of(sqlite_url(database))
    heavy, none = await keeper.weigh("run", ["run/1/1", "nobody"])
    assert (heavy.calls, heavy.spans, none) == (4, 2, Weight())
    assert heavy.bytes > 100
    await keeper.forget_calls("run", ["run/1/1"])
    assert await keeper.weigh("run", ["run/1/1"]) == [Weight()]
    after = await content(database)
    assert after["rollouts"] == before["rollouts"]
    for place, rollout in enumerate(before["rollouts"]):
        gone = rollout.group == "run/1/1"
        for what in ("calls", "spans", "events", "extras"):
            assert after[what][place] == ([] if gone else before[what][place])


async def test_calls_of_a_group_in_which_something_still_runs_stay(database: Path) -> None:
    store = SqliteStore(database)
    await store.open()
    await store.create_rollouts([Rollout("late", "run", Task("q"), "run/1/1")])
    await store.close()
    before = await content(database)
    await keeper_of(sqlite_url(database)).forget_calls("run", ["run/1/1"])
    assert await content(database) == before


async def begin(store: SqliteStore, rollout: str, group: str, parent: tuple[str, int, int] | None = None) -> None:
    await store.create_rollouts([Rollout(rollout, "run", Task("q"), group, parent=parent)])
    assert [lease.rollout.id for lease in await store.lease("run", "w", ttl=3600)] == [rollout]


async def append(store: SqliteStore, rollout: str, prompt: Sequence[int], seq: int = 0) -> Transition:
    ids, response = token_ids(prompt), token_ids([1, 2, 3])
    made = Transition(rollout, 1, seq, f"{rollout}-{seq}", ids, response, logprobs([-0.5] * 3))
    assert await store.append([made]) == 1
    return made


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """A store that remembers a call of the group `g`, and that it was branched, which another process has removed. It began
    with the ids 100 to 199."""
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    await store.put_run(Run("run", "run"))
    await begin(store, "a", "g")
    await append(store, "a", range(100, 200))
    await store.complete("a", 1, Outcome(reward=1.0))
    await begin(store, "branch", "g", ("a", 1, 0))
    await append(store, "branch", range(100, 200))
    await store.complete("branch", 1, Outcome(reward=1.0))
    await keeper_of(sqlite_url(tmp_path / "store.db")).forget_calls("run", ["g"])
    assert rows(tmp_path / "store.db", "SELECT count(*) FROM transitions") == [(0,)]
    yield store
    await store.close()


@pytest.mark.parametrize("parent", [None, ("a", 1, 0)], ids=["a rollout", "a branch"])
@pytest.mark.parametrize("start", [100, 5000], ids=["the same tokens", "other tokens"])
async def test_no_call_is_stored_against_another_groups_that_has_the_number_of_one_that_was_removed(
    server: SqliteStore, tmp_path: Path, start: int, parent: tuple[str, int, int] | None
) -> None:
    """With the same tokens it could be read, until the other group is removed."""
    await begin(server, "other", "h")
    await append(server, "other", range(start, start + 100))
    await server.complete("other", 1, Outcome(reward=1.0))
    await begin(server, "b", "g", parent)
    made = await append(server, "b", [*range(100, 200), 9])
    assert await server.transitions("b") == [made]
    await keeper_of(sqlite_url(tmp_path / "store.db")).forget_calls("run", ["h"])
    assert await server.transitions("b") == [made]


async def test_no_call_is_stored_against_one_of_its_attempt_that_has_the_number_of_one_that_was_removed(
    server: SqliteStore,
) -> None:
    await begin(server, "b", "g")
    first = await append(server, "b", range(5000, 5100))
    second = await append(server, "b", [*range(100, 200), 9], seq=1)
    assert await server.transitions("b") == [first, second]


async def test_a_run_goes_with_all_that_is_its_own(database: Path, filled: Callable[..., Any]) -> None:
    before = await content(database)
    store = SqliteStore(database)
    await store.open()
    await filled(store, "other")
    await store.close()
    keeper = keeper_of(sqlite_url(database))
    await keeper.forget_run("other")
    await keeper.vacuum()
    assert await content(database) == before
    own = ("rollouts", "attempts", "transitions", "spans", "steps", "metrics", "state", "runs")
    assert [rows(database, f"SELECT count(*) FROM {table}")[0][0] for table in own] == [10, 10, 20, 10, 2, 4, 2, 1]
    assert rows(database, "SELECT count(*) FROM revisions WHERE run = 'other'") == [(0,)]
    assert rows(database, "PRAGMA journal_mode") != [("memory",)]


async def test_a_run_is_not_removed_under_whoever_works_on_it(database: Path) -> None:
    keeper = keeper_of(sqlite_url(database))
    store = SqliteStore(database)
    await store.open()
    with pytest.raises(StoreError, match="open in another process"):
        await keeper.forget_run("run")
    await store.create_rollouts([Rollout("new", "run", Task("q"), "n")])
    await store.lease("run", "w", ttl=3600)
    assert await keeper.busy_runs() == {"run"}
    await store.close()
    with pytest.raises(StoreError, match="somebody works on run 'run'"):
        await keeper.forget_run("run")
    assert len((await content(database))["rollouts"]) == 11


async def test_what_gateways_keep_of_a_run_goes_with_it(database: Path) -> None:
    store = SqliteStore(database)
    await store.open()
    await check_state_of_gateways(store, sqlite_url(database))
    await store.close()


async def test_who_writes_meanwhile_waits_for_a_few_of_the_old_traces(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be hundreds of thousands: a trainer that waited for all of them would give up."""
    monkeypatch.setattr(relational, "TRACES_AT_ONCE", 2)
    connection = sqlite3.connect(database, isolation_level=None, timeout=0, check_same_thread=False)
    for number in range(5):
        trace = (f"{number:032x}", json.dumps([f"gone-{number}", 1, 2e9]))
        connection.execute("INSERT INTO state (run, name, value) VALUES ('gateway/traces', ?, ?)", trace)
    left = []

    def trace_of(value: str) -> tuple[str, float]:
        connection.execute("UPDATE runs SET created_at = created_at + 1")  # locked, unless nobody else writes
        left.append(connection.execute("SELECT count(*) FROM state WHERE run = 'gateway/traces'").fetchone()[0])
        return before(value)

    before = queries.trace_of
    monkeypatch.setattr(queries, "trace_of", trace_of)
    await keeper_of(sqlite_url(database)).vacuum()
    connection.close()
    assert sorted(set(left), reverse=True) == [5, 3, 1]
    assert rows(database, "SELECT count(*) FROM state WHERE run = 'gateway/traces'") == [(0,)]


async def test_space_is_given_back_once_nobody_else_has_the_file_open(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("UPDATE transitions SET tokens = zeroblob(100000) WHERE seq = 0")
    connection.commit()
    connection.close()
    store = SqliteStore(database)
    await store.open()
    keeper = keeper_of(sqlite_url(database))
    large = database.stat().st_size
    await keeper.forget_calls("run", ["run/1/0", "run/1/1", "run/2/0", "run/2/1", "run/val/0"])
    assert "keeps its size, since it is open in another process" in await keeper.vacuum()
    assert database.stat().st_size >= large
    await store.put_state("run", "note", "it goes on")
    await store.close()
    assert await keeper.vacuum() == ""
    assert database.stat().st_size < large - 900_000


async def test_a_file_without_unused_space_is_not_made_anew(database: Path) -> None:
    made = rows(database, "PRAGMA schema_version")  # VACUUM counts it up
    store = SqliteStore(database)
    await store.open()
    assert await keeper_of(sqlite_url(database)).vacuum() == ""
    await store.close()
    assert await keeper_of(sqlite_url(database)).vacuum() == ""
    assert rows(database, "PRAGMA schema_version") == made


def test_a_database_whose_plugin_is_switched_off_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "postgres")
    found = Plugins()
    monkeypatch.setattr(keeper, "plugins", lambda: found)
    with pytest.raises(PluginError, match=r"The plugin 'postgres' .*, which might have it, is disabled"):
        keeper_of("postgresql://host/db")
    with pytest.raises(ConfigError, match="a memory store keeps nothing"):
        keeper_of("memory://")


@pytest.mark.parametrize("scheme", ["postgresql", "redis", "http"])
@pytest.mark.parametrize(
    "password", ["hun/ter2", "12/ter2", "hun?ter2", "hun?ter2=x", "/ter2", "h@n/ter2", "h?schema=ter2"]
)
def test_a_password_that_is_not_quoted_is_refused_and_not_shown(scheme: str, password: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keeper_of(f"{scheme}://me:{password}@db:5432/0")
    assert "ter2" not in str(caught.value)
    assert "%2F for a / of the password, %3F for a ?" in str(caught.value) or scheme == "http"


def test_a_server_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"http://\*\*\*@h/x is a server, not a database"):
        keeper_of("http://me:hunter2@h/x")


def test_nothing_is_imported_of_a_database_before_it_is_needed() -> None:
    script = "import sys, lightning_db.plugin; assert not {'sqlite3', 'zstandard', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
