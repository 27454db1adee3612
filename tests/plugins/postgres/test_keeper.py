"""A Postgres schema: looked at, copied to a file and back, pruned; the file is a store like any other."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.cli import runs
from lightning.cli.output import with_store
from lightning.errors import DataError, SchemaError, StoreError
from lightning.store.protocol import TRACES_RUN, Store
from lightning.store.relational import operations
from lightning.store.relational.transaction import KEEP_VERSION
from lightning.store.schema import SCHEMA
from lightning.store.sqlite import SqliteStore
from lightning.types import Outcome, Rollout, Run, Scope, Task
from lightning_db import command as db
from lightning_db import queries, relational
from lightning_db.keeper import Weight, keeper_of
from lightning_db.prune import PruneRequest, carry_out, plan
from lightning_otel.traces.store import spans
from lightning_postgres.connection import PostgresTransaction
from lightning_postgres.store import PostgresStore
from lightning_resources import command
from lightning_resources.nouns import Resource
from lightning_resources.operations import alias_history, list_resources, put_resource, set_alias
from lightning_server.tokens import Token, list_tokens, put_token
from typer import Typer
from typer.testing import CliRunner

from tests.plugins.db.gateways import check_state_of_gateways
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.slow


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    """A schema that does not exist yet."""
    return postgres_server.url_of(f"kept_{uuid.uuid4().hex[:12]}", pool=2)


@pytest.fixture
async def store(url: str, filled: Callable[..., Any]) -> AsyncIterator[PostgresStore]:
    made = PostgresStore.from_url(url)
    await made.open()
    await filled(made)
    await put_resource(made, Resource("writer", "Write."))
    await put_resource(made, Resource("writer", "Rhyme."))
    await set_alias(made, "writer", "production", 1)
    await put_token(made, Token("t1", Scope.RUNNER, "ab" * 32, "lab", "ci", 1000.0, 2000.0))
    yield made
    await made.close()


async def content(store: Store) -> dict[str, Any]:
    """All that a store says of its run, but for numbers that are not equal to themselves."""
    rollouts = (await store.list_rollouts("run")).items
    return {
        "runs": await store.list_runs(),
        "rollouts": rollouts,
        "calls": await store.transitions_of([(rollout.id, 1) for rollout in rollouts]),
        "events": [list((await store.attempts_of([(rollout.id, None)]))[0].tool_events) for rollout in rollouts],
        "extras": [list((await store.attempts_of([(rollout.id, None)]))[0].extras.items()) for rollout in rollouts],
        "rewards": [list((await store.attempts_of([(rollout.id, None)]))[0].step_rewards) for rollout in rollouts],
        "spans": [await spans(store, rollout.id) for rollout in rollouts],
        "steps": await store.steps("run"),
        "metrics": [(point.step, sorted(point.values), point.at) for point in await store.metrics("run")],
        "resources": await list_resources(store),
        "moves": await alias_history(store, "writer", "production"),
        "tokens": await list_tokens(store),
        "state": await store.get_state("run", "note"),
    }


async def test_status(store: PostgresStore, url: str, postgres_server: PostgresServer) -> None:
    found = await keeper_of(url).status()
    assert (found.schema, found.runs, found.steps) == (SCHEMA, 1, 2)
    assert found.rollouts == {"succeeded": 9, "failed": 1}
    assert (found.calls, found.spans, found.resources) == (20, 10, 2)
    assert found.tokens == {"active": 0, "expired": 1, "revoked": 0}
    assert found.bytes is not None
    assert found.bytes > 100_000
    assert "***@" in found.store
    with pytest.raises(SchemaError, match="holds no store"):
        await keeper_of(postgres_server.url_of("nobody_was_here")).status()
    assert postgres_server.sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'nobody_was_here'") == "0"


async def test_there_and_back(store: PostgresStore, url: str, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Postgres to a file, the file to another schema, and both go on where the first stood."""
    before = await content(store)
    await keeper_of(url).backup(tmp_path / "backup.db")
    assert [file.name for file in tmp_path.iterdir()] == ["backup.db"]
    file = SqliteStore(tmp_path / "backup.db")
    await file.open()
    assert await content(file) == before
    await file.close()
    with pytest.raises(StoreError, match="exists already"):
        await keeper_of(url).backup(tmp_path / "backup.db")
    await store._write(lambda tx: tx.run(KEEP_VERSION, ("verdicts", 1)))
    with pytest.raises(
        StoreError, match="tables that a plugin made for its operations 'verdicts', and that plugin, or a rel"
    ):
        await keeper_of(url).backup(tmp_path / "other.db")
    await store._write(lambda tx: tx.run("DELETE FROM operation_groups WHERE name = 'verdicts'"))

    other = postgres_server.url_of(f"kept_{uuid.uuid4().hex[:12]}", pool=2)
    await keeper_of(other).restore(tmp_path / "backup.db")
    restored = PostgresStore.from_url(other)
    await restored.open()
    assert await content(restored) == before
    for going in (store, restored):
        assert await going.create_rollouts([Rollout("new", "run", before["rollouts"][0].task, "run/1/0")]) == 1
        (lease,) = await going.lease("run", "w")
        call = before["calls"][0][0]
        fresh = type(call)("new", lease.attempt, 0, "c", call.prompt_ids, call.response_ids, call.logprobs)
        assert await going.append([fresh]) == 1
        await going.complete("new", lease.attempt, Outcome(reward=1.0))
        assert await going.transitions("new") == [fresh]
        assert (await put_resource(going, Resource("writer", "Sing."))).version == 3
    await restored.close()
    with pytest.raises(StoreError, match="is not empty"):
        await keeper_of(other).restore(tmp_path / "backup.db")


async def test_a_restore_that_breaks_off_leaves_an_empty_schema(
    store: PostgresStore, url: str, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    await keeper_of(url).backup(tmp_path / "backup.db")
    connection = sqlite3.connect(tmp_path / "backup.db")
    connection.execute("UPDATE tokens SET scope = x'ff00'")  # the last table: everything before it is copied by then
    connection.commit()
    connection.close()
    other = postgres_server.url_of(f"kept_{uuid.uuid4().hex[:12]}", pool=2)
    with pytest.raises(DataError, match="a row of table tokens in the backup is damaged"):
        await keeper_of(other).restore(tmp_path / "backup.db")
    assert (await keeper_of(other).status()).runs == 0


async def test_a_file_of_another_schema_is_not_restored(url: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as file:
        file.executescript("CREATE TABLE schema_version (version); INSERT INTO schema_version VALUES (11)")
    with pytest.raises(
        SchemaError, match=f"old.db has schema 11, but this version of lightning works with schema {SCHEMA} only"
    ):
        await keeper_of(url).restore(tmp_path / "old.db")


async def test_pruning(store: PostgresStore, url: str) -> None:
    keeper = keeper_of(url)
    before = await content(store)
    plans = await plan(store, keeper, PruneRequest())
    assert (plans[0].groups, plans[0].weight.calls) == (("run/1/1", "run/2/1", "run/val/0"), 12)
    await carry_out(store, keeper, plans)
    await keeper.vacuum()
    after = await content(store)
    assert after["rollouts"] == before["rollouts"]
    kept = [place for place, rollout in enumerate(before["rollouts"]) if rollout.trained_at_step is not None]
    assert [after["calls"][place] for place in kept] == [before["calls"][place] for place in kept]
    assert await keeper.weigh("run", ["run/1/1"]) == [Weight()]
    assert "run" in await keeper.activity()


async def test_old_traces_go_a_few_at_a_time(
    store: PostgresStore, url: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relational, "TRACES_AT_ONCE", 2)
    kept = (await store.list_rollouts("run")).items[0].id
    for number in range(5):
        await store.put_state(TRACES_RUN, f"{number:032x}", [kept if number == 2 else f"gone-{number}", 1, 2e9])
    left = []

    def trace_of(value: str) -> tuple[str, float]:
        left.append(
            postgres_server.sql(f"SELECT count(*) FROM {store._settings.schema}.state WHERE run = '{TRACES_RUN}'")
        )
        return before(value)

    before = queries.trace_of
    monkeypatch.setattr(queries, "trace_of", trace_of)
    await keeper_of(url).vacuum()
    assert sorted(set(left), reverse=True) == ["5", "3", "2"]
    assert [await store.get_state(TRACES_RUN, f"{number:032x}") is None for number in range(5)] == [
        True,
        True,
        False,
        True,
        True,
    ]


async def test_whole_runs(store: PostgresStore, url: str, filled: Callable[..., Any]) -> None:
    keeper = keeper_of(url)
    await filled(store, "other")
    before = await content(store)
    await store.create_rollouts([Rollout("o", "other", before["rollouts"][0].task, "g")])
    await store.lease("other", "w", ttl=3600)
    assert await keeper.busy_runs() == {"other"}
    branch = Rollout("b", "other", before["rollouts"][0].task, "g", parent=("run/1/0/0", 1, 0))
    await store.create_rollouts([branch])
    assert await keeper.branched_runs() == {"other"}
    with pytest.raises(StoreError, match="somebody works on run 'other'"):
        await keeper.forget_run("other")
    await store.release("w")
    await keeper.forget_run("other")
    assert await content(store) == {**before, "runs": [run for run in before["runs"] if run.id == "run"]}
    assert (await keeper.status()).calls == 20


@pytest.mark.parametrize("whole", [True, False])
async def test_a_live_server_stores_no_call_against_one_that_was_pruned(
    store: PostgresStore, url: str, whole: bool
) -> None:
    """It remembers the roots of the group, which are gone when the same names come again."""
    call = (await store.transitions("run/1/0/0"))[0]

    async def work(name: str) -> None:
        await store.put_run(Run("again", "again"))
        await store.create_rollouts([Rollout(f"{name}-{i}", "again", Task("x"), group="g") for i in range(2)])
        for lease in await store.lease("again", "w", limit=2):
            made = replace(call, rollout=lease.rollout.id, attempt=lease.attempt)
            assert await store.append([made]) == 1
            await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
            assert await store.transitions(lease.rollout.id) == [made]

    await work("a")
    if whole:
        await keeper_of(url).forget_run("again")
    else:
        await keeper_of(url).forget_calls("again", ["g"])
    await work("a" if whole else "b")
    roots = await store._read(lambda tx: tx.all(operations.SELECT_GROUP_ROOTS, ("again", "g", 10)))
    assert len(roots) == 1  # the second is stored against the first again


async def test_reading_while_somebody_prunes_sees_one_moment(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pruned, look = await store.transitions("run/1/1/0"), [], PostgresTransaction.all

    async def look_and_prune(self: PostgresTransaction, query: str, values: Any = ()) -> Any:
        found = await look(self, query, values)
        if query == operations.SELECT_TRANSITIONS and not pruned:
            pruned.append(1)
            await keeper_of(url).forget_calls("run", ["run/1/1"])
        return found

    monkeypatch.setattr(PostgresTransaction, "all", look_and_prune)
    assert await store.transitions("run/1/1/1") != []  # its parent is a call of the other rollout
    assert whole != []
    assert await store.transitions("run/1/1/1") == []


async def test_what_gateways_keep_of_a_run_goes_with_it(store: PostgresStore, url: str) -> None:
    await check_state_of_gateways(store, url)


async def test_a_file_that_is_no_store_is_refused_before_anything_is_made(
    url: str, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    (tmp_path / "text").write_text("hello" * 1000)
    (tmp_path / "empty").touch()
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    for name, said in (("text", "not an SQLite database"), ("empty", "is empty"), ("other", "bookmarks")):
        with pytest.raises(SchemaError, match=said):
            await keeper_of(url).restore(tmp_path / name)
    schema = url.partition("schema=")[2].partition("&")[0]
    assert postgres_server.sql(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{schema}'") == "0"


@pytest.mark.parametrize(
    ("app", "command"),
    [
        (db.app, ("export", "URL", "-", "--table", "runs")),
        (db.app, ("prune", "URL")),
        (db.app, ("status", "URL")),
        (runs.app, ("--runs", "URL")),
        (command.app, ("ls", "URL")),
    ],
)
def test_a_mistyped_schema_is_not_made(app: Typer, command: tuple[str, ...], postgres_server: PostgresServer) -> None:
    name = f"typo_{uuid.uuid4().hex[:12]}"
    url = postgres_server.url_of(name)
    done = CliRunner().invoke(app, [url if part == "URL" else part for part in command])
    assert isinstance(done.exception, SchemaError)
    assert "holds no store: check ?schema=" in str(done.exception)
    assert postgres_server.sql(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{name}'") == "0"


async def test_a_store_is_made_where_there_is_none(postgres_server: PostgresServer) -> None:
    async def look(store: Store) -> list[Run]:
        return await store.list_runs()

    name = f"made_{uuid.uuid4().hex[:12]}"
    url = postgres_server.url_of(name)
    assert await with_store(url, look, make=True) == []


async def test_another_schema_is_refused(store: PostgresStore, url: str, postgres_server: PostgresServer) -> None:
    schema = url.partition("schema=")[2].partition("&")[0]
    postgres_server.sql(f"UPDATE {schema}.schema_version SET version = 99")
    for act in (keeper_of(url).status, keeper_of(url).vacuum, PostgresStore.from_url(url).open):
        with pytest.raises(
            SchemaError, match=f"has schema 99, but this version of lightning works with schema {SCHEMA} only"
        ):
            await act()
