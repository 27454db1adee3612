"""Resources on every store: versions that never change, aliases with a history, and what was earned under each version."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.errors import ConflictError, DataError, StoreError
from lightning.store import Alias, ResourceUse, Store
from lightning.store.sqlite import SqliteStore
from lightning.types import Fault, Outcome, Resource, ResourceKind, Rollout, StepRecord

from tests.core.store.backends import everywhere

RolloutOf = Callable[..., Rollout]


def moves(aliases: list[Alias]) -> list[tuple[str, str, int]]:
    return [(alias.name, alias.alias, alias.version) for alias in aliases]


@everywhere
async def test_versions_count_up_and_the_same_content_is_the_same_version(store: Store) -> None:
    first = await store.put_resource(Resource("writer", "Write on {topic}.", metadata={"made_by": "hand"}))
    assert (first.version, first.metadata) == (1, {"made_by": "hand"})
    assert first.created_at > 1e9
    second = await store.put_resource(Resource("writer", "Rhyme on {topic}!", metadata={"parent": 1}))
    assert second.version == 2
    assert await store.put_resource(Resource("writer", "Write on {topic}.", metadata={"made_by": "chance"})) == first
    assert await store.list_resources("writer") == [first, second]
    assert await store.get_resource("writer") == await store.get_resource("writer", "latest") == second
    assert await store.get_resource("writer", 1) == first
    assert await store.get_resource("writer", 3) is None
    assert await store.get_resource("writer", "production") is None
    assert await store.get_resource("nobody") is None


async def test_the_digest_is_of_the_text_itself_so_that_anybody_can_check_it(store: Store) -> None:
    stored = await store.put_resource(Resource("writer", "Größe {x}"))
    assert stored.digest == hashlib.sha256("Größe {x}".encode()).hexdigest()
    config = {"b": [1, 2.5, None], "a": "x"}
    kept = await store.put_resource(Resource("limits", config, ResourceKind.CONFIG))
    assert (kept.content, kept.kind) == (config, ResourceKind.CONFIG)
    assert (await store.put_resource(Resource("limits", {"a": "x", "b": (1, 2.5, None)}, ResourceKind.CONFIG))) == kept
    assert [item.name for item in await store.list_resources()] == ["limits", "writer"]


async def test_a_name_belongs_to_one_kind(store: Store) -> None:
    await store.put_resource(Resource("writer", "text"))
    with pytest.raises(ConflictError, match=r"'writer' is a prompt, not a config"):
        await store.put_resource(Resource("writer", "text", ResourceKind.CONFIG))


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
        await store.put_resource(Resource("writer", text))
    assert (await store.set_alias("writer", "production", 1)).version == 1
    moved = await store.set_alias("writer", "production", 3)
    assert (moved.version, (await store.get_resource("writer", "production")).content) == (3, "three")  # type: ignore[union-attr]
    assert await store.set_alias("writer", "production", 3) == moved
    await store.set_alias("writer", "production", 2)
    assert [(await store.roll_back_alias("writer", "production")).version for _ in range(2)] == [3, 1]
    with pytest.raises(StoreError, match="always been version 1"):
        await store.roll_back_alias("writer", "production")
    history = await store.alias_history("writer", "production")
    assert [move.version for move in history] == [1, 3, 2, 3, 1]
    assert [move.at for move in history] == sorted(move.at for move in history)
    await store.set_alias("writer", "production", 2)
    assert (await store.roll_back_alias("writer", "production")).version == 1


async def test_aliases_are_listed_with_the_newest_version_among_them(store: Store) -> None:
    for name in ("writer", "checker"):
        await store.put_resource(Resource(name, "one"))
    await store.put_resource(Resource("writer", "two"))
    await store.set_alias("writer", "production", 2)
    await store.set_alias("writer", "production", 1)
    await store.set_alias("writer", "canary", 2)
    expected = [("checker", "latest", 1), ("writer", "canary", 2), ("writer", "latest", 2), ("writer", "production", 1)]
    assert moves(await store.list_aliases()) == expected
    assert moves(await store.list_aliases("checker")) == expected[:1]


@pytest.mark.parametrize("alias", ["latest", "7", "", "a b", "a@b"])
async def test_what_cannot_name_an_alias_is_refused(store: Store, alias: str) -> None:
    await store.put_resource(Resource("writer", "one"))
    with pytest.raises(DataError, match="alias"):
        await store.set_alias("writer", alias, 1)


async def test_an_alias_points_to_what_exists(store: Store) -> None:
    await store.put_resource(Resource("writer", "one"))
    with pytest.raises(StoreError, match="no version 2 of the resource 'writer'; there are: 1"):
        await store.set_alias("writer", "production", 2)
    with pytest.raises(StoreError, match="no alias 'production'"):
        await store.roll_back_alias("writer", "production")


async def test_many_writers_make_each_version_once(store: Store) -> None:
    made = await asyncio.gather(*(store.put_resource(Resource("w", f"text {number % 5}")) for number in range(40)))
    assert sorted({item.version for item in made}) == [1, 2, 3, 4, 5]
    assert len(await store.list_resources("w")) == 5


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
    assert await store.resource_uses("writer") == [
        ResourceUse("run", "train", 1, 2, 2, 0, 0.5),
        ResourceUse("run", "train", 2, 2, 1, 1, 0.25),
        ResourceUse("run", "val", 2, 1, 1, 0, 1.0),
    ]
    assert await store.resource_uses("checker") == [
        ResourceUse("run", "train", 1, 1, 1, 0, 1.0),
        ResourceUse("run", "train", 2, 1, 1, 0, 0.0),
    ]
    assert await store.resource_uses("nobody") == []


@pytest.mark.parametrize("version", [0, "1", True])
async def test_a_rollout_cannot_run_with_what_is_no_version(store: Store, rollout: RolloutOf, version: object) -> None:
    with pytest.raises(DataError, match=r"names version .* of resource 'writer'"):
        await store.create_rollouts([rollout(resources={"writer": version})])


async def test_a_step_keeps_the_groups_it_looked_at(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout()])
    await store.lease("run", "w")
    await store.complete("a", 1, Outcome(reward=1.0))
    await store.commit_step(StepRecord("run", 0, 1, (("a", 1),), ("d",), "x", groups=("g", "h"), at=1.0))
    await store.commit_step(StepRecord("run", 1, 2, (), (), "y", at=2.0))
    assert [record.groups for record in await store.steps("run")] == [("g", "h"), ()]


async def test_a_changed_version_is_noticed(sqlite: SqliteStore, tmp_path: Path) -> None:
    import sqlite3

    await sqlite.put_resource(Resource("writer", "one"))
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("UPDATE resources SET content = '\"two\"'")
    connection.close()
    with pytest.raises(StoreError, match="version 1 of resource 'writer' is corrupt"):
        await sqlite.get_resource("writer")
