"""Resources on every store: versions that never change, aliases with a history, and what was earned under each version."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from lightning.errors import ConflictError, DataError, StoreError
from lightning.store import Store
from lightning.store.sqlite import SqliteStore
from lightning.types import Fault, Outcome, Rollout, StepRecord
from lightning_resources import sql
from lightning_resources.nouns import Alias, Resource, ResourceKind, ResourceUse
from lightning_resources.operations import (
    RESOURCES,
    alias_history,
    get_resource,
    list_aliases,
    list_resources,
    put_resource,
    resource_uses,
    roll_back_alias,
    set_alias,
)

from tests.core.store.backends import everywhere

RolloutOf = Callable[..., Rollout]


def moves(aliases: list[Alias]) -> list[tuple[str, str, int]]:
    return [(alias.name, alias.alias, alias.version) for alias in aliases]


@everywhere
async def test_versions_count_up_and_the_same_content_is_the_same_version(store: Store) -> None:
    first = await put_resource(store, Resource("writer", "Write on {topic}.", metadata={"made_by": "hand"}))
    assert (first.version, first.metadata) == (1, {"made_by": "hand"})
    assert first.created_at > 1e9
    second = await put_resource(store, Resource("writer", "Rhyme on {topic}!", metadata={"parent": 1}))
    assert second.version == 2
    assert await put_resource(store, Resource("writer", "Write on {topic}.", metadata={"made_by": "chance"})) == first
    assert await list_resources(store, "writer") == [first, second]
    assert await get_resource(store, "writer") == await get_resource(store, "writer", "latest") == second
    assert await get_resource(store, "writer", 1) == first
    assert await get_resource(store, "writer", 3) is None
    assert await get_resource(store, "writer", "production") is None
    assert await get_resource(store, "nobody") is None


async def test_the_digest_is_of_the_text_itself_so_that_anybody_can_check_it(store: Store) -> None:
    stored = await put_resource(store, Resource("writer", "Größe {x}"))
    assert stored.digest == hashlib.sha256("Größe {x}".encode()).hexdigest()
    config = {"b": [1, 2.5, None], "a": "x"}
    kept = await put_resource(store, Resource("limits", config, ResourceKind.CONFIG))
    assert (kept.content, kept.kind) == (config, ResourceKind.CONFIG)
    assert (await put_resource(store, Resource("limits", {"a": "x", "b": (1, 2.5, None)}, ResourceKind.CONFIG))) == kept
    assert [item.name for item in await list_resources(store)] == ["limits", "writer"]


async def test_a_name_belongs_to_one_kind(store: Store) -> None:
    await put_resource(store, Resource("writer", "text"))
    with pytest.raises(ConflictError, match=r"'writer' is a prompt, not a config"):
        await put_resource(store, Resource("writer", "text", ResourceKind.CONFIG))


@pytest.mark.parametrize("name", ["", "a@b", "a#b", " a", "a\nb"])
def test_a_name_that_a_reference_could_not_hold_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="cannot name a resource"):
        Resource(name, "text")


def test_what_is_no_text_is_no_prompt_and_what_is_not_json_no_config() -> None:
    with pytest.raises(DataError, match="a prompt is a text"):
        Resource("a", {"text": "x"})
    with pytest.raises(DataError, match=r"content of the resource 'a' is not JSON: \['x'\] is nan"):
        Resource("a", {"x": float("nan")}, ResourceKind.CONFIG)
    with pytest.raises(DataError, match="metadata of the resource 'a' is not JSON"):
        Resource("a", "x", metadata={"made": object()})  # type: ignore[dict-item]


@everywhere
async def test_an_alias_moves_and_returns(store: Store) -> None:
    for text in ("one", "two", "three"):
        await put_resource(store, Resource("writer", text))
    assert (await set_alias(store, "writer", "production", 1)).version == 1
    moved = await set_alias(store, "writer", "production", 3)
    assert (moved.version, (await get_resource(store, "writer", "production")).content) == (3, "three")  # type: ignore[union-attr]
    assert await set_alias(store, "writer", "production", 3) == moved
    await set_alias(store, "writer", "production", 2)
    assert [(await roll_back_alias(store, "writer", "production")).version for _ in range(2)] == [3, 1]
    with pytest.raises(StoreError, match="always been version 1"):
        await roll_back_alias(store, "writer", "production")
    history = await alias_history(store, "writer", "production")
    assert [move.version for move in history] == [1, 3, 2, 3, 1]
    assert [move.at for move in history] == sorted(move.at for move in history)
    await set_alias(store, "writer", "production", 2)
    assert (await roll_back_alias(store, "writer", "production")).version == 1


async def test_aliases_are_listed_with_the_newest_version_among_them(store: Store) -> None:
    for name in ("writer", "checker"):
        await put_resource(store, Resource(name, "one"))
    await put_resource(store, Resource("writer", "two"))
    await set_alias(store, "writer", "production", 2)
    await set_alias(store, "writer", "production", 1)
    await set_alias(store, "writer", "canary", 2)
    expected = [("checker", "latest", 1), ("writer", "canary", 2), ("writer", "latest", 2), ("writer", "production", 1)]
    assert moves(await list_aliases(store)) == expected
    assert moves(await list_aliases(store, "checker")) == expected[:1]


@pytest.mark.parametrize("alias", ["latest", "7", "", "a b", "a@b"])
async def test_what_cannot_name_an_alias_is_refused(store: Store, alias: str) -> None:
    await put_resource(store, Resource("writer", "one"))
    with pytest.raises(DataError, match="alias"):
        await set_alias(store, "writer", alias, 1)


async def test_an_alias_points_to_what_exists(store: Store) -> None:
    await put_resource(store, Resource("writer", "one"))
    with pytest.raises(StoreError, match="no version 2 of the resource 'writer'; there are: 1"):
        await set_alias(store, "writer", "production", 2)
    with pytest.raises(StoreError, match="no alias 'production'"):
        await roll_back_alias(store, "writer", "production")


async def test_many_writers_make_each_version_once(store: Store) -> None:
    made = await asyncio.gather(*(put_resource(store, Resource("w", f"text {number % 5}")) for number in range(40)))
    assert sorted({item.version for item in made}) == [1, 2, 3, 4, 5]
    assert len(await list_resources(store, "w")) == 5


@everywhere
async def test_a_rollout_says_what_it_runs_with_and_the_store_what_that_earned(
    store: Store, rollout: RolloutOf
) -> None:
    planned = [
        rollout("a", resources={"writer": 1, "checker": 2}),
        rollout("b", resources={"checker": 1, "writer": 1}),
        rollout("c", resources={"writer": 2}),
        rollout("d", resources={"writer": 2}, split="val"),
        rollout("e", resources={"writer": 2}),
        rollout("f"),
    ]
    await store.create_rollouts(planned)
    assert [lease.rollout.resources for lease in await store.lease("run", "w", limit=6)] == [
        item.resources for item in planned
    ]
    for name, reward in (("a", 0.0), ("b", 1.0), ("c", 0.25), ("d", 1.0)):
        await store.complete(name, 1, Outcome(reward=reward))
    await store.complete("e", 1, Outcome(fault=Fault.AGENT, error="raised"))
    assert (await store.get_rollout("b")).resources == {"writer": 1, "checker": 1}  # type: ignore[union-attr]
    assert await resource_uses(store, "writer") == [
        ResourceUse("run", "train", 1, 2, 2, 0, 0.5),
        ResourceUse("run", "train", 2, 2, 1, 1, 0.25),
        ResourceUse("run", "val", 2, 1, 1, 0, 1.0),
    ]
    assert await resource_uses(store, "checker") == [
        ResourceUse("run", "train", 1, 1, 1, 0, 1.0),
        ResourceUse("run", "train", 2, 1, 1, 0, 0.0),
    ]
    assert await resource_uses(store, "nobody") == []


@pytest.mark.parametrize("version", [0, "1", True])
async def test_a_rollout_cannot_run_with_what_is_no_version(store: Store, rollout: RolloutOf, version: object) -> None:
    with pytest.raises(DataError, match=r"names version .* of resource 'writer'"):
        await store.create_rollouts([rollout(resources={"writer": version})])


async def test_a_step_keeps_the_groups_it_looked_at(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout()])
    await store.lease("run", "w")
    await store.complete("a", 1, Outcome(reward=1.0))
    await store.commit_step(StepRecord("run", 1, 1, (("a", 1),), ("d",), "x", groups=("g", "h"), at=1.0))
    await store.commit_step(StepRecord("run", 2, 2, (), (), "y", at=2.0))
    assert [record.groups for record in await store.steps("run")] == [("g", "h"), ()]


async def test_a_changed_version_is_noticed(sqlite: SqliteStore, tmp_path: Path) -> None:
    import sqlite3

    await put_resource(sqlite, Resource("writer", "one"))
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("UPDATE resources SET content = '\"two\"'")
    connection.close()
    with pytest.raises(StoreError, match="version 1 of resource 'writer' is corrupt"):
        await get_resource(sqlite, "writer")


@everywhere
async def test_an_alias_that_is_moved_again_under_an_id_stays_where_others_moved_it(store: Store) -> None:
    for text in "abc":
        await put_resource(store, Resource("w", text))
    first = await set_alias(store, "w", "production", 1, once="1")
    await set_alias(store, "w", "production", 2)
    assert await set_alias(store, "w", "production", 1, once="1") == first
    back = await roll_back_alias(store, "w", "production", once="1")
    await set_alias(store, "w", "production", 3)
    assert await roll_back_alias(store, "w", "production", once="1") == back
    assert [move.version for move in await alias_history(store, "w", "production")] == [1, 2, 1, 3]


def test_an_sql_database_has_a_function_with_the_arguments_of_each_operation() -> None:
    functions = sql.PART.functions
    assert set(functions) == {operation.name for operation in RESOURCES.operations}
    for operation in RESOURCES.operations:
        found = list(inspect.signature(functions[operation.name]).parameters)[1:]
        assert found == list(operation.signature.parameters), operation


async def test_the_table_has_a_column_for_each_field(sqlite: SqliteStore) -> None:
    await put_resource(sqlite, Resource("writer", "Write on {topic}."))
    found = await sqlite._read(lambda tx: tx.all("PRAGMA table_info(resources)"))
    assert set(sql.COLUMNS.columns) <= {row[1] for row in found}
    assert set(sql.COLUMNS.fields) <= {field.name for field in fields(Resource)}


def test_statements_have_as_many_places_as_columns() -> None:
    inserts = [text for name, text in vars(sql).items() if name.startswith("INSERT_")]
    assert len(inserts) == 2
    for text in inserts:
        names = text.partition("(")[2].partition(")")[0]
        assert text.count("?") == len(names.split(",")), text
