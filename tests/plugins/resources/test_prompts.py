"""What `runner.prompts` means for a run: texts, versions, aliases, and resources of other stores."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import ConfigError, SchemaError, StoreError
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.store.schema import SCHEMA
from lightning.store.sqlite import SqliteStore
from lightning.store.url import sqlite_url
from lightning.types import Rollout, Run, Task
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import get_resource, put_resource, resource_uses, set_alias
from lightning_resources.prompts import resolve_prompts
from lightning_resources.reference import ResourceReference, find, parse_reference


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    await made.open()
    await made.put_run(Run("run", "run"))
    for text in ("one", "two", "three"):
        await put_resource(made, Resource("writer", text))
    await set_alias(made, "writer", "production", 2)
    yield made
    await made.close()


def rollout(**resources: int) -> Rollout:
    return Rollout("r", "run", Task("x"), "g", resources=resources)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("resource:writer", ResourceReference("writer")),
        ("writer@3", ResourceReference("writer", 3)),
        ("resource:my writer@production", ResourceReference("my writer", "production")),
        ("resource:runs/a#b#writer@2", ResourceReference("writer", 2, "runs/a#b")),
        ("sqlite:////x.db?sync=full#writer", ResourceReference("writer", "latest", "sqlite:////x.db?sync=full")),
    ],
)
def test_references(text: str, reference: ResourceReference) -> None:
    assert parse_reference(text) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize("text", ["", "resource:", "@3", "writer@", "#writer", "writer@a@b", "runs/a#"])
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(ConfigError, match="names no resource"):
        parse_reference(text)


@pytest.mark.parametrize("text", ["postgresql://me:hunter2@db/l", "redis://me:hunter2@db/0#writer@"])
def test_a_reference_that_is_refused_shows_no_password(text: str) -> None:
    with pytest.raises(ConfigError, match=r"//\*\*\*@db/\S* names no resource") as caught:
        parse_reference(text)
    assert "hunter2" not in str(caught.value)


async def test_a_resource_that_is_not_there_is_named_without_the_password_of_its_store(store: Store) -> None:
    with pytest.raises(StoreError, match=r"no resource redis://\*\*\*@db/0#writer@9;"):
        await find(store, parse_reference("redis://me:hunter2@db/0#writer@9"))


async def test_texts_and_references_side_by_side(store: Store) -> None:
    prompts = await resolve_prompts(store, "run", {"writer": "resource:writer@production", "checker": "Check {x}."})
    assert prompts.of(rollout()) == {"writer": "two", "checker": "Check {x}."}
    (stamped,) = await prompts.stamp(store, [rollout()])
    assert stamped.resources == {"writer": 2}
    assert prompts.of(rollout(writer=1)) == {"writer": "one", "checker": "Check {x}."}


async def test_a_component_may_have_another_resource_than_its_name(store: Store) -> None:
    prompts = await resolve_prompts(store, "run", {"poet": "resource:writer", "critic": "resource:writer@3"})
    assert prompts.of(rollout()) == {"poet": "three", "critic": "three"}
    with pytest.raises(ConfigError, match="versions 3 and 1 of 'writer' at once"):
        await resolve_prompts(store, "run", {"poet": "resource:writer", "critic": "resource:writer@1"})


async def test_a_version_that_came_later_is_found_when_a_rollout_runs_with_it(store: Store) -> None:
    prompts = await resolve_prompts(store, "run", {"writer": "resource:writer"})
    new = await put_resource(store, Resource("writer", "four"))
    (stamped,) = await prompts.stamp(store, [rollout(writer=new.version)])
    assert prompts.of(stamped) == {"writer": "four"}
    with pytest.raises(StoreError, match="there is no resource writer@9"):
        await prompts.stamp(store, [rollout(writer=9)])


async def test_a_run_goes_on_with_the_prompts_it_began_with(store: Store) -> None:
    settings = {"writer": "resource:writer@production"}
    prompts = await resolve_prompts(store, "run", settings)
    await prompts.keep(store, "run")
    await set_alias(store, "writer", "production", 3)
    assert (await resolve_prompts(store, "run", settings)).of(rollout()) == {"writer": "two"}
    assert (await resolve_prompts(store, "other", settings)).of(rollout()) == {"writer": "three"}


async def test_a_resource_of_another_store_is_copied_into_this_one(store: Store, tmp_path: Path) -> None:
    other = SqliteStore(tmp_path / "tuned" / "lightning.db")
    await other.open()
    await put_resource(other, Resource("writer", "zero"))
    await put_resource(other, Resource("writer", "tuned", metadata={"made_by": "apo"}))
    await other.close()
    for place in (
        str(tmp_path / "tuned"),
        str(tmp_path / "tuned" / "lightning.db"),
        f"sqlite:///{tmp_path}/tuned/lightning.db",
    ):
        prompts = await resolve_prompts(store, "run", {"writer": f"resource:{place}#writer@2"})
        assert prompts.of(rollout()) == {"writer": "tuned"}
        assert prompts.versions == {"writer": 4}
    copied = await get_resource(store, "writer", 4)
    assert copied is not None
    assert copied.metadata == {"made_by": "apo", "origin": {"store": str(tmp_path / "tuned"), "version": 2}}
    home = await resolve_prompts(
        store, "run", {"writer": "resource:writer@1"}, home=f"sqlite:///{tmp_path}/tuned/lightning.db"
    )
    assert home.of(rollout()) == {"writer": "zero"}


async def test_another_store_of_another_schema_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            f"CREATE TABLE schema_version (version); INSERT INTO schema_version VALUES ({SCHEMA + 1})"
        )
    before = path.read_bytes()
    with pytest.raises(
        SchemaError, match=f"has schema {SCHEMA + 1}, but this version of lightning works with schema {SCHEMA} only"
    ):
        await resolve_prompts(store, "run", {"writer": f"resource:{path}#writer@2"})
    assert path.read_bytes() == before


async def test_where_a_prompt_came_from_is_kept_without_its_password(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = sqlite_url(tmp_path / "lightning.db")
    other = SqliteStore(tmp_path / "lightning.db")
    await other.open()
    await put_resource(other, Resource("tuned", "text"))
    await put_resource(other, Resource("rates", "{}", ResourceKind.CONFIG))
    await other.close()
    monkeypatch.setattr("lightning_resources.prompts.existing_store", lambda place: url)
    place = "postgresql://user:hunter2@host/db"
    await resolve_prompts(store, "run", {"writer": f"resource:{place}#tuned"})
    copied = await get_resource(store, "tuned", 1)
    assert copied is not None
    assert copied.metadata["origin"] == {"store": "postgresql://***@host/db", "version": 1}
    with pytest.raises(ConfigError, match=r"writer: rates@1 is a config, not a prompt"):
        await resolve_prompts(store, "run", {"writer": f"resource:{place}#rates"})


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        (
            "resource:writer@canary",
            r"no resource writer@canary; there are: versions 1, 2, 3; writer@latest",
            StoreError,
        ),
        ("resource:nobody", r"no resource nobody@latest; there are: writer@latest, writer@production", StoreError),
        ("resource:nowhere#writer", "there is no database at 'nowhere'", ConfigError),
    ],
)
async def test_a_reference_that_leads_nowhere_says_what_there_is(
    store: Store, text: str, words: str, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        await resolve_prompts(store, "run", {"writer": text})
    assert not list(tmp_path.iterdir())


async def test_rollouts_of_training_run_with_the_live_prompt_and_say_so(
    bench: Any, answering: Any, tmp_path: Path
) -> None:
    seen: list[str] = []

    async def reads(task: Task, llm: Any) -> float:
        seen.append(llm.prompts["writer"])
        reward: float = await answering(task, llm)
        return reward

    async with bench(tmp_path, reads, trainer__steps=1) as made:
        await put_resource(made.store, Resource("writer", "first"))
        await put_resource(made.store, Resource("writer", "tuned"))
        await set_alias(made.store, "writer", "production", 2)
        made.loop.stack.prompts = await resolve_prompts(made.store, "run", {"writer": "resource:writer@production"})
        await made.loop.run({})
        rollouts = (await made.store.list_rollouts("run")).items
        uses = await resource_uses(made.store, "writer")
    assert set(seen) == {"tuned"}
    assert {tuple(rollout.resources.items()) for rollout in rollouts} == {(("writer", 2),)}
    assert {(use.split, use.version) for use in uses} == {("train", 2), ("val", 2)}
