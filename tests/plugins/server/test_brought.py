"""Operations that a stranger's plugin brings to every store: tables, scripts, typed functions and a rule of ownership."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import DataError, PluginError, SchemaError, StoreError
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.store.relational.transaction import SqlPart
from lightning.store.sqlite import SqliteStore
from lightning.types import Rollout, Run, Scope, Task
from lightning_server.api import app
from lightning_server.auth import issue_token
from lightning_server.http_store import HttpStore
from lightning_server.tokens import put_token

from tests.plugins.server.strangers import check_answers, check_projects
from tests.servers.control import ControlServer

STORES = pytest.mark.parametrize(
    "make_store", ["memory", "sqlite", "http", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True
)


@STORES
async def test_a_strangers_operations_are_those_of_every_store(
    lab: Callable[..., Any], make_store: Callable[[], Store]
) -> None:
    here, store = lab(), make_store()
    await store.open()
    await check_answers(here, store)
    await store.close()


@STORES
async def test_a_project_sees_of_them_what_is_its_own(lab: Callable[..., Any], make_store: Callable[[], Store]) -> None:
    here, store = lab(), make_store()
    await store.open()
    await check_projects(here, store)
    await store.close()


async def test_a_token_of_a_project_is_refused_over_http(lab: Callable[..., Any], control: ControlServer) -> None:
    here = lab()
    store = MemoryStore()
    url, _ = control.add(store)
    control.run(store.put_run(Run("theirs", "a run", project="theirs")))
    control.run(store.create_rollouts([Rollout("theirs/0", "theirs", Task("q"), "g")]))
    mine, plain = issue_token(Scope.RUNNER, "mine")
    control.run(put_token(store, mine))
    client = HttpStore(url, token=plain, patience=5)
    await client.open()
    with pytest.raises(StoreError, match="rollout 'theirs/0' is unknown"):
        await here.put_verdict(client, "theirs/0", here.Verdict("theirs/0", "ann", "well done"))
    with pytest.raises(StoreError, match="judges is for admins of all projects"):
        await here.judges(client, "well done")
    await client.close()
    control.remove(url)


async def test_a_server_without_the_plugin_says_so(lab: Callable[..., Any], control: ControlServer) -> None:
    url, token = control.add(MemoryStore())
    here = lab()
    store = HttpStore(url, token=token, patience=5)
    await store.open()
    for asked in (here.verdicts(store, "a"), here.judges(store, "x")):
        with pytest.raises(
            StoreError, match=rf"{url} cannot do \w+: it has no plugin that brings 'verdicts'.*verdicts-lab"
        ):
            await asked
    await store.close()
    control.remove(url)


async def test_a_store_that_the_plugin_has_no_part_for_says_so(lab: Callable[..., Any], tmp_path: Path) -> None:
    here = lab(**{'"sql": ': '"mongo": '})
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    with pytest.raises(
        StoreError,
        match=r"store\.db'\) cannot do verdicts: the plugin that brings 'verdicts' has nothing .*'sql'. Use mongo",
    ):
        await here.verdicts(store, "a")
    await store.close()


async def test_tables_are_made_once_and_a_later_release_adds_its_step(lab: Callable[..., Any], tmp_path: Path) -> None:
    here = lab()
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    await store.open()
    assert await here.verdicts(store, "a") == [], "to look makes no tables"
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT * FROM operation_groups").fetchall() == []
        assert not file.execute("SELECT name FROM sqlite_master WHERE name LIKE 'verdicts%'").fetchall()
    await here.put_verdict(store, "a", here.Verdict("a", "ann", "well done"))
    part: SqlPart = here.verdicts.group.part(here.verdicts, "sql", store)
    await store.close()

    import lab_verdicts_sql as module  # type: ignore[import-not-found]

    step = ("ALTER TABLE verdicts ADD COLUMN weight REAL NOT NULL DEFAULT 1",)
    module.PART = SqlPart(part.reads, part.writes, (*part.tables, step))
    for _ in range(2):
        await store.open()
        assert await here.verdicts(store, "a") == [here.Verdict("a", "ann", "well done")]
        await store.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT * FROM operation_groups").fetchall() == [("verdicts", 2)]
        assert file.execute("SELECT weight FROM verdicts").fetchall() == [(1.0,)]
    module.PART = part
    await store.open()
    with pytest.raises(
        SchemaError, match=r"tables of 'verdicts' of step 2, and the plugin .* knows 1: install the newer"
    ):
        await here.verdicts(store, "a")
    await store.close()


async def test_a_process_that_writes_makes_the_tables_at_its_first_look(
    lab: Callable[..., Any], tmp_path: Path
) -> None:
    """So that its next looks are no transactions that write."""
    here = lab()
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    await store.put_run(Run("run", "a run"))
    assert await here.verdicts(store, "a") == []
    with closing(sqlite3.connect(tmp_path / "store.db")) as file:
        assert file.execute("SELECT * FROM operation_groups").fetchall() == [("verdicts", 1)]
    await store.close()


async def test_a_table_that_is_not_the_groups_is_refused(lab: Callable[..., Any], tmp_path: Path) -> None:
    here = lab(**{"CREATE INDEX NAME_by_rollout": "CREATE INDEX by_rollout"})
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    with pytest.raises(StoreError, match=r"would make 'by_rollout' in .*called verdicts or verdicts_"):
        await here.verdicts(store, "a")
    with closing(sqlite3.connect(tmp_path / "store.db")) as file:
        assert not file.execute("SELECT name FROM sqlite_master WHERE name LIKE 'verdicts%'").fetchall()
    await store.close()


def test_two_owners_of_a_name_are_refused_at_the_start(lab: Callable[..., Any]) -> None:
    lab()
    lab("more")
    both = r"the plugin 'more' \(more-lab 1.0\) and the plugin 'verdicts' \(verdicts-lab 1.0\) both have the operation"
    with pytest.raises(PluginError, match=rf"{both} .*Uninstall one of them"):
        app.routes()


def test_an_operation_of_the_store_is_nobody_elses(lab: Callable[..., Any]) -> None:
    lab(judges="list_runs")
    with pytest.raises(
        PluginError, match=r"the store and the plugin 'verdicts' .* both have the operation 'list_runs'"
    ):
        app.routes()


def test_two_that_answer_the_same_requests_are_refused_at_the_start(lab: Callable[..., Any]) -> None:
    lab(**{'/rollouts/{rollout}/verdicts", ANY': '/rollouts/{rollout}/transitions", ANY'})
    with pytest.raises(
        PluginError, match=r"the server itself and the plugin .*'verdicts' both answer GET /api/v1/rollouts/"
    ):
        app.routes()


def test_a_parameter_without_a_meaning_is_refused_at_the_start_by_the_plugins_name(lab: Callable[..., Any]) -> None:
    lab(**{"def verdicts(self, rollout: str)": "def verdicts(self, rollout: str, least: int = 1)"})
    with pytest.raises(PluginError, match=r"the plugin .*'verdicts' has the operation 'verdicts'.*give it query="):
        app.routes()


def test_a_word_that_means_a_key_of_the_state_needs_a_rule(lab: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"an argument `key`, which means a key of the state"):
        lab(**{"def judges(self, text: str)": "def judges(self, run: str, key: str)", ", owned=for_admins": ""})


async def test_a_value_that_is_none_of_the_operations_is_refused_on_its_way(
    lab: Callable[..., Any], control: ControlServer
) -> None:
    here = lab()
    store = MemoryStore()
    url, token = control.add(store)
    client = HttpStore(url, token=token, patience=5)
    await client.open()
    with pytest.raises(DataError):
        await here.put_verdict(client, "a", here.Verdict("a", "ann", 7))
    await client.close()
    control.remove(url)
