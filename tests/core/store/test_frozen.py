"""A database of each schema that was released is brought forward, and what it recorded is read back equal."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import SchemaError
from lightning.installation import upgrade_cure
from lightning.store import Alias, MetricPoint, exchanges
from lightning.store.exchanges import Exchange
from lightning.store.relational.schema import MIGRATIONS
from lightning.store.sqlite import SqliteStore
from lightning.types import (
    Caller,
    Conversation,
    Fault,
    Outcome,
    Resource,
    ResourceKind,
    Rollout,
    Run,
    Scope,
    Span,
    Status,
    StepRecord,
    StepReward,
    StepState,
    Task,
    Token,
    ToolEvent,
    Transition,
    VersionRun,
)

FROZEN = Path(__file__).parent / "frozen"
VERSIONS = range(1, len(MIGRATIONS) + 1)
CallOf = Callable[..., Transition]


def frozen(path: Path, version: int) -> Path:
    """A database as the release that had this schema version wrote it."""
    connection = sqlite3.connect(path)
    connection.executescript((FROZEN / f"version-{version}.sql").read_text())
    connection.close()
    return path


async def opened(path: Path, version: int) -> SqliteStore:
    store = SqliteStore(frozen(path, version))
    await store.open()
    return store


def expected_calls(version: int, call: CallOf) -> list[Transition]:
    """What the frozen databases say of rollout `a`, each in what its schema had a place for."""
    versions = (VersionRun(0, 1 if version < 3 else 0),)
    times = {"started_at": 1.5, "ended_at": 2.5} if version < 3 else {"started_at": 1.0, "ended_at": 2.0}
    common: dict[str, Any] = {"versions": versions, "finish_reason": "stop" if version < 3 else "", **times}
    judge = Caller("judge", ("root", "judge")) if version > 1 else Caller("writer", ("root", "writer"), "span")
    return [
        call(0, (1, 2, 3), (4, 5), id="call-a0", tool_calls=("t-0",) if version > 2 else (), **common),
        call(1, (1, 2, 3, 4, 5, 6), (7,), id="call-a1", caller=judge, **common),
    ]


def test_every_schema_that_was_released_is_kept() -> None:
    assert {file.name for file in FROZEN.glob("version-*.sql")} == {f"version-{version}.sql" for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
async def test_calls_are_read_back_equal(tmp_path: Path, call: CallOf, version: int) -> None:
    store = await opened(tmp_path / "store.db", version)
    project = "lab" if version > 4 else "default"
    assert await store.list_runs() == [Run("run", "a run", {"train_agents": ["writer"]}, 1000.0, project)]
    assert await store.transitions("a") == expected_calls(version, call)
    (found,) = await store.transitions("b")
    assert (found.id, list(found.prompt_ids), list(found.response_ids)) == ("call-b0", [1, 2, 3], [8])
    said = Conversation(({"role": "user", "content": "q"}, {"role": "assistant", "content": "é"}), "call-x", 1)
    asked = Exchange("/chat/completions", {"messages": [{"role": "user", "content": "q"}]}, {"id": "call-b0"}, 200)
    assert found.conversation == (said if version > 6 else None)
    (exchange,) = exchanges.read([found])  # earlier releases recorded none
    assert exchange == (asked if version > 9 else None)
    assert await store.append([found]) == 0  # its digest is still what the older release wrote
    await store.close()


@pytest.mark.parametrize("version", VERSIONS[1:])
async def test_outcomes_steps_and_state_are_read_back_equal(tmp_path: Path, version: int) -> None:
    store = await opened(tmp_path / "store.db", version)
    resources = {"writer": 2} if version > 3 else {}
    assert await store.get_rollout("a") == Rollout(
        "a",
        "run",
        Task({"q": "a"}),
        "g",
        status=Status.SUCCEEDED,
        attempt=1,
        reward=0.5,
        rewards={"f1": 0.5},
        seconds=3.0,
        trained_at_step=0,
        resources=resources,
    )
    branch = await store.get_rollout("c")
    assert version < 4 or branch is not None  # the first frozen databases have two rollouts
    assert branch is None or branch.parent == (("a", 1, 1) if version > 10 else None)
    assert list((await store.attempts_of([("a", None)]))[0].tool_events) == [
        ToolEvent("t", "ok", "c1", {"x": 1}, "out", at=2.0)
    ]
    assert list((await store.attempts_of([("a", None)]))[0].step_rewards) == [StepReward(0.25, "fmt", "call-a0", 2.0)]
    states = (StepState({"k": 1}, "state", "call-a0", 2.0),) if version > 9 else ()
    assert (await store.attempts_of([("a", None)]))[0].step_states == states
    checkpoint, at = ("step-1", 5.0) if version == 2 else ("step-00000001", 1001.0)
    groups = ("g",) if version > 3 else ()
    context = {"epoch": 0, "dtype": "float32"} if version > 7 else {}
    step = StepRecord("run", 0, 1, (("a", 1),), ("d0",), "digest", checkpoint, {"loss": 0.5}, at, groups, context)
    assert await store.steps("run") == [step]
    (point,) = await store.metrics("run")
    assert (point.step, point.values["reward"]) == (0, 0.5)
    assert set(point.values) == ({"reward", "odd"} if version > 3 else {"reward"})
    assert isinstance(point, MetricPoint)
    assert await store.get_state("run", "gateway_secret") == "00ff"
    await store.commit_step(step)  # the same proof: nothing to do
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_spans_are_read_back_equal(tmp_path: Path, version: int) -> None:
    store = await opened(tmp_path / "store.db", version)
    span = Span("a", 1, "0" * 32, "2" * 16, name="step", started_at=1.0, ended_at=2.0, service="app")
    assert await store.spans("a") == ([replace(span, attributes={"k": [1]})] if version > 2 else [])
    await store.close()


@pytest.mark.parametrize("version", VERSIONS[3:])
async def test_resources_are_read_back_equal(tmp_path: Path, version: int) -> None:
    store = await opened(tmp_path / "store.db", version)
    found = [replace(resource, created_at=0.0) for resource in await store.list_resources()]
    assert found == [
        Resource("limits", {"k": [1, 2.5]}, ResourceKind.CONFIG, version=1),
        Resource("writer", "Write about {topic}.", version=1),
        Resource("writer", "Rhyme about {topic}.", metadata={"parent": 1}, version=2),
    ]
    assert [move.version for move in await store.alias_history("writer", "production")] == [1, 2, 1]
    assert [(alias.name, alias.alias, alias.version) for alias in await store.list_aliases()] == [
        ("limits", "latest", 1),
        ("writer", "latest", 2),
        ("writer", "production", 1),
    ]
    assert all(isinstance(alias, Alias) and alias.at > 1e9 for alias in await store.list_aliases())
    (first, second) = await store.resource_uses("writer")
    assert [(use.version, use.rollouts, use.reward) for use in (first, second)] == [(1, 1, None), (2, 1, 0.5)]
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_tokens_are_read_back_equal(tmp_path: Path, version: int) -> None:
    store = await opened(tmp_path / "store.db", version)
    tokens = await store.list_tokens()
    if version < 5:
        assert tokens == []
    else:
        runner, admin = tokens
        assert runner == Token("t1", Scope.RUNNER, "ab" * 32, "lab", "ci", 1000.0, 2000.0)
        assert replace(admin, revoked_at=None) == Token("t2", Scope.ADMIN, "cd" * 32, "*", "me", 1000.0)
        assert admin.revoked_at is not None
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_work_goes_on_where_the_older_release_left_it(tmp_path: Path, call: CallOf, version: int) -> None:
    store = await opened(tmp_path / "store.db", version)
    (found,) = await store.transitions("b")
    new = call(1, rollout="b", prompt=(1, 2, 3, 8, 9), tool_calls=("t-1",))
    assert await store.append([new]) == 1
    assert await store.append_spans([Span("b", 1, "0" * 32, "1" * 16)]) == 1
    await store.complete("b", 1, Outcome(reward=1.0, labels={"call-b0": Caller("x")}))
    assert await store.transitions("b") == [replace(found, caller=Caller("x")), new]
    await store.create_rollouts([Rollout("new", "run", Task("new"), "n", resources={"writer": 1})])
    leases = await store.lease("run", "w", limit=5)
    assert [lease.rollout.id for lease in leases][-1] == "new"
    failed = await store.complete("new", 1, Outcome(fault=Fault.AGENT))
    assert (failed.status, failed.resources) == (Status.FAILED, {"writer": 1})
    assert (await store.put_resource(Resource("other", "text"))).version == 1
    await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_older_file_ends_as_a_new_one_begins(tmp_path: Path, version: int) -> None:
    """Same tables, same columns in type, default and key, same indexes; only the columns' order may differ."""
    for name, store in (("new.db", SqliteStore(tmp_path / "new.db")), ("old.db", None)):
        store = store or SqliteStore(frozen(tmp_path / name, version))
        await store.open()
        await store.close()
    assert schema(tmp_path / "old.db") == schema(tmp_path / "new.db")


def schema(path: Path) -> dict[str, object]:
    connection = sqlite3.connect(path)
    found: dict[str, object] = {}
    for kind, name in connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('table', 'index')"):
        pragma = "table_info" if kind == "table" else "index_xinfo"
        rows = connection.execute(f"PRAGMA {pragma}({name!r})").fetchall()
        found[name] = sorted(row[1:] for row in rows) if kind == "table" else [row[2] for row in rows]
    connection.close()
    return found


async def test_a_schema_of_a_newer_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = frozen(tmp_path / "store.db", VERSIONS[-1])
    connection = sqlite3.connect(path)
    connection.execute("UPDATE schema_version SET version = ?", (len(MIGRATIONS) + 1,))
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SchemaError, match=re.escape(f"newer release: {upgrade_cure()}")):
        await SqliteStore(path).open()
    assert path.read_bytes() == before
