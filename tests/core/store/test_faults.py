"""What a store says when the database is damaged, foreign, newer, locked or out of space, and that it goes on afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.errors import DataError, SchemaError, StoreError, UnavailableError
from lightning.store.schema import SCHEMA
from lightning.store.sqlite import SqliteStore
from lightning.store.sqlite.connection import Settings, translate
from lightning.types import Caller, Outcome, Rollout, Run, Task, Transition

CallOf = Callable[..., Transition]


async def refused(path: Path, **options: float) -> StoreError:
    """The error that opening `path` gives; the store object must be usable again afterwards."""
    store = SqliteStore(path, **options)  # type: ignore[arg-type]
    with pytest.raises(StoreError) as caught:
        await store.open()
    with pytest.raises(StoreError, match="not open"):
        await store.list_runs()
    await store.close()
    assert str(path) in str(caught.value)
    return caught.value


def execute(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


async def filled(path: Path, rollouts: int = 1) -> SqliteStore:
    """An open store with leased rollouts `a` (and `b0`, `b1` ...)."""
    store = SqliteStore(path)
    await store.open()
    await store.put_run(Run("run", "a run"))
    names = ["a", *(f"b{i}" for i in range(rollouts - 1))]
    await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in names])
    await store.lease("run", "w", limit=rollouts, ttl=3600)
    return store


# a database that is not ours ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [SCHEMA + 1, 99])
async def test_a_database_of_another_schema_is_refused_untouched(tmp_path: Path, version: int) -> None:
    path = tmp_path / "store.db"
    await (await filled(path)).close()
    execute(path, f"UPDATE schema_version SET version = {version}")
    before = path.read_bytes()
    error = await refused(path)
    assert isinstance(error, SchemaError)
    assert str(error) == (
        f"store {path} has schema {version}, but this version of lightning works with schema {SCHEMA} only: use the version "
        "that wrote it, or begin a new run"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", ["-1", "0", "NULL", "'x'"])
async def test_a_damaged_version_is_refused(tmp_path: Path, version: str) -> None:
    path = tmp_path / "store.db"
    execute(path, "CREATE TABLE schema_version (version)", f"INSERT INTO schema_version VALUES ({version})")
    assert isinstance(await refused(path), SchemaError)


async def test_a_database_of_another_program_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    execute(path, "CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    error = await refused(path)
    assert isinstance(error, SchemaError)
    assert "bookmarks" in str(error)
    assert path.read_bytes() == before  # still without a write-ahead log
    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]


@pytest.mark.parametrize("version", [None, 99], ids=["foreign", "other"])
async def test_a_refused_database_keeps_the_log_its_owner_left(tmp_path: Path, version: int | None) -> None:
    """Its owner was killed: what is in the log belongs to whoever opens it next with the right program."""
    killed = """
        import os, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE schema_version (version)" if sys.argv[2] != "None" else "CREATE TABLE t (x)")
        if sys.argv[2] != "None":
            connection.execute("INSERT INTO schema_version VALUES (?)", (int(sys.argv[2]),))
        os._exit(0)
    """
    path = tmp_path / "store.db"
    subprocess.run([sys.executable, "-c", textwrap.dedent(killed), str(path), str(version)], check=True)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir() if not file.name.endswith("-shm")}
    assert files["store.db-wal"]
    assert isinstance(await refused(path), SchemaError)
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


async def test_a_foreign_database_with_a_journal_of_its_own_kind_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "a name?with#odd %41 letters.db"
    execute(path, "PRAGMA journal_mode = PERSIST", "CREATE TABLE bookmarks (url TEXT)")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert isinstance(await refused(path), SchemaError)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


async def test_a_store_left_half_created_is_finished(tmp_path: Path) -> None:
    """Killed while it created the file: the journal that is left must be rolled back, not met read-only."""
    killed = """
        import os, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        connection.execute("PRAGMA page_size = 16384")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("PRAGMA cache_spill = 1")
        connection.execute("CREATE TABLE old (x)")
        connection.execute("DROP TABLE old")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE t (x)")
        for _ in range(50):
            connection.execute("INSERT INTO t VALUES (zeroblob(20000))")
        os._exit(0)
    """
    path = tmp_path / "store.db"
    subprocess.run([sys.executable, "-c", textwrap.dedent(killed), str(path)], check=True)
    assert (tmp_path / "store.db-journal").stat().st_size
    store = await filled(path)
    assert [run.id for run in await store.list_runs()] == ["run"]
    assert await store._write(lambda tx: tx.one("PRAGMA page_size")) == (16384,)
    await store.close()


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 4000], ids=["text", "header"]
)
async def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    error = await refused(path)
    assert isinstance(error, SchemaError)
    assert ".recover" in str(error)
    assert path.read_bytes() == content


async def test_a_truncated_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await (await filled(path)).close()
    path.write_bytes(path.read_bytes()[: 3 * 16384])
    assert isinstance(await refused(path), SchemaError)


async def test_damage_inside_is_noticed_when_it_is_met(tmp_path: Path, call: CallOf) -> None:
    path = tmp_path / "store.db"
    store = await filled(path)
    await store.append([call(i, range(i * 1000, i * 1000 + 900)) for i in range(40)])
    await store.close()
    data = bytearray(path.read_bytes())
    data[-3 * 16384 : -16384] = os.urandom(2 * 16384)
    path.write_bytes(data)
    store = SqliteStore(path)
    await store.open()
    with pytest.raises(StoreError, match=r"corrupt") as caught:
        await store.transitions("a", 1)
    assert "backup" in str(caught.value)
    await store.close()


async def test_tables_are_made_once_when_processes_open_a_new_file_together(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "store.db") for _ in range(6)]
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].put_run(Run("r", "r"))
    assert [run.id for run in await stores[5].list_runs()] == ["r"]
    await asyncio.gather(*(store.close() for store in stores))
    connection = sqlite3.connect(tmp_path / "store.db")
    assert connection.execute("SELECT version FROM schema_version").fetchall() == [(SCHEMA,)]
    connection.close()


# rows that were damaged or edited -------------------------------------------------------------------------------

EDITS = (
    "UPDATE transitions SET tokens = zeroblob(100) WHERE seq = 0",
    "UPDATE transitions SET tokens = (SELECT tokens FROM transitions WHERE seq = 0) WHERE seq = 2",
    "UPDATE transitions SET versions = '[[0,5]]' WHERE seq = 1",
    "UPDATE transitions SET versions = 'x' WHERE seq = 1",
    "UPDATE transitions SET seq = 9 WHERE seq = 2",
    "UPDATE transitions SET caller = '[\"other\"]' WHERE seq = 1",
    "UPDATE transitions SET status = 'odd' WHERE seq = 1",
    "UPDATE transitions SET finish_reason = 'length' WHERE seq = 1",
    "UPDATE transitions SET id = 'x' WHERE seq = 1",
    "UPDATE transitions SET temperature = 0.5 WHERE seq = 1",
    "UPDATE transitions SET tool_calls = '[\"x\"]' WHERE seq = 1",
    "UPDATE transitions SET tool_calls = '5' WHERE seq = 1",
    "UPDATE transitions SET extras = x'0161010000007a' WHERE seq = 1",
    "UPDATE transitions SET extras = x'05' WHERE seq = 1",
    "UPDATE transitions SET parent = NULL WHERE seq = 1",
    "UPDATE transitions SET parent = n WHERE seq = 1",
    "UPDATE transitions SET parent = 77 WHERE seq = 2",
    "DELETE FROM transitions WHERE seq = 0",
)


@pytest.mark.parametrize("edit", EDITS)
async def test_an_edited_transition_is_noticed(tmp_path: Path, call: CallOf, edit: str) -> None:
    path = tmp_path / "store.db"
    store = await filled(path)
    await store.append([call(i, range(100 * (i + 1)), [i], finish_reason="stop") for i in range(3)])
    assert len(await store.transitions("a")) == 3
    execute(path, edit)
    with pytest.raises(StoreError, match=r"transition \('a', 1, \d\) is corrupt"):
        await store.transitions("a")
    await store.close()


@pytest.mark.parametrize("edit", [edit for edit in EDITS if "parent" not in edit and "DELETE" not in edit])
async def test_a_label_does_not_make_an_edited_transition_look_whole(tmp_path: Path, call: CallOf, edit: str) -> None:
    path = tmp_path / "store.db"
    store = await filled(path)
    await store.append([call(i, range(100 * (i + 1)), [i], id="reply", finish_reason="stop") for i in range(3)])
    execute(path, edit)
    await store.complete("a", 1, Outcome(reward=1.0, labels={"reply": Caller("b"), "x": Caller("b")}))
    with pytest.raises(StoreError, match=r"transition \('a', 1, \d\) is corrupt"):
        await store.transitions("a")
    await store.close()


async def test_a_damaged_call_does_not_stop_new_ones(tmp_path: Path, call: CallOf) -> None:
    path = tmp_path / "store.db"
    store = await filled(path)
    await store.append([call(0, range(100))])
    await store.close()
    execute(path, "UPDATE transitions SET tokens = zeroblob(100)")
    store = SqliteStore(path)
    await store.open()
    assert await store.append([call(1, range(200))]) == 1
    await store.close()


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE rollouts SET task = 'x'",
        "UPDATE rollouts SET rewards = '[1]'",
        "UPDATE attempts SET tool_events = '{}'",
        "UPDATE attempts SET step_rewards = '['",
    ],
)
async def test_damaged_json_is_named(tmp_path: Path, edit: str) -> None:
    store = await filled(tmp_path / "store.db")
    execute(tmp_path / "store.db", edit)
    with pytest.raises(StoreError, match="is corrupt in the database"):
        await (store.get_rollout("a") if "rollouts" in edit else store.attempts_of([("a", 1)]))
    await store.close()


# paths, locks ---------------------------------------------------------------------------------------------------


async def test_folders_are_made(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "deep" / "er" / "store.db")
    await store.open()
    await store.close()
    assert (tmp_path / "deep" / "er" / "store.db").is_file()


async def test_impossible_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "folder" in str(await refused(tmp_path / "file" / "store.db"))
    assert "path" in str(await refused(tmp_path))


async def test_a_lock_that_is_held_too_long_is_named_and_survived(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await (await filled(path)).close()
    store = SqliteStore(path, busy_timeout=0.05)
    await store.open()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"another process kept it locked for 0.05 s.*busy_timeout"):
        await store.put_state("run", "k", 1)
    assert await store.get_state("run", "k") is None  # readers do not wait for writers
    other.execute("ROLLBACK")
    other.close()
    await store.put_state("run", "k", 1)
    assert await store.get_state("run", "k") == 1
    await store.close()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (sqlite3.SQLITE_FULL, UnavailableError, "disk is full"),
        (sqlite3.SQLITE_IOERR_WRITE, UnavailableError, "disk refused"),
        (sqlite3.SQLITE_READONLY, StoreError, "read-only"),
        (sqlite3.SQLITE_CANTOPEN, StoreError, "cannot be opened"),
        (sqlite3.SQLITE_PERM, StoreError, "permission"),
        (sqlite3.SQLITE_CORRUPT_INDEX, SchemaError, "backup"),
        (sqlite3.SQLITE_NOTADB, SchemaError, "backup"),
        (sqlite3.SQLITE_MISMATCH, StoreError, "refused"),
    ],
)
def test_every_refusal_names_the_file_and_the_cure(code: int, kind: type[StoreError], words: str) -> None:
    error = sqlite3.OperationalError("original words")
    error.sqlite_errorcode = code
    found = translate(error, Settings("/data/store.db"))
    assert type(found) is kind
    for part in ("/data/store.db", words, "original words"):
        assert part in str(found)
    assert isinstance(translate(OverflowError("too large"), Settings("x.db")), DataError)
    assert translate(KeyError("a fault of ours"), Settings("x.db")).args == ("a fault of ours",)


# out of space ---------------------------------------------------------------------------------------------------


async def test_a_full_database_loses_nothing_and_goes_on_when_there_is_space(tmp_path: Path, call: CallOf) -> None:
    path = tmp_path / "store.db"
    store = await filled(path)
    pages = await store._write(lambda tx: tx.one("PRAGMA page_count"))
    assert pages is not None
    await store._write(lambda tx: tx.one(f"PRAGMA max_page_count = {pages[0] + 3}"))
    calls = [call(i, random.Random(i).sample(range(150_000), 900)) for i in range(60)]
    results = await asyncio.gather(*(store.append([c]) for c in calls), return_exceptions=True)
    acknowledged = [c for c, result in zip(calls, results, strict=True) if result == 1]
    errors = [result for result in results if result != 1]
    assert acknowledged
    assert errors
    assert all(type(error) is UnavailableError and "disk is full" in str(error) for error in errors)
    assert all(str(path) in str(error) for error in errors)
    assert await store.transitions("a") == acknowledged
    await store._write(lambda tx: tx.one("PRAGMA max_page_count = 1000000"))
    assert sum(await asyncio.gather(*(store.append([c]) for c in calls))) == len(errors)
    await store.complete("a", 1, Outcome(reward=1.0))
    await store.close()
    again = SqliteStore(path)
    await again.open()
    assert await again.transitions("a") == calls
    await again.close()


DISK = """
    import asyncio, random, resource, sys
    from lightning.errors import UnavailableError
    from lightning.store.sqlite import SqliteStore
    from lightning.types import Rollout, Run, Task, Transition, logprobs, token_ids

    def call(i):
        ids = token_ids(random.Random(i).sample(range(150_000), 1500))
        return Transition("a", 1, i, "c", ids, token_ids([i]), logprobs([-1.0]))

    async def main(path):
        store = SqliteStore(path)
        await store.open()
        await store.create_rollouts([Rollout("a", "run", Task("q"), "g")])
        await store.lease("run", "w", ttl=3600)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        results = await asyncio.gather(*(store.append([call(i)]) for i in range(400)), return_exceptions=True)
        kept = [i for i, r in enumerate(results) if r == 1]
        assert all(r == 1 or (type(r) is UnavailableError and "disk" in str(r)) for r in results), results
        assert 0 < len(kept) < 400, len(kept)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert [t.seq for t in await store.transitions("a")] == kept
        assert sum(await asyncio.gather(*(store.append([call(i)]) for i in range(400)))) == 400 - len(kept)
        await store.close()
        store = SqliteStore(path)
        await store.open()
        assert await store.transitions("a") == [call(i) for i in range(400)]
        await store.close()
        print("kept", len(kept))

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_disk_that_refuses_to_write_loses_nothing(tmp_path: Path) -> None:
    """The limit on file size stands in for a full disk: the write itself fails, in the middle of a commit."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISK), str(tmp_path / "store.db")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kept" in done.stdout
