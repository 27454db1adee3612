"""A prefix of a Redis: looked at, and pruned so that what stays is read as it was."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import with_store
from lightning.errors import ConfigError, SchemaError, StoreError, UnavailableError
from lightning.store.schema import SCHEMA
from lightning.types import Outcome, Rollout, Scope, Task, Transition
from lightning_db.keeper import Weight, keeper_of
from lightning_db.prune import PruneRequest, carry_out, plan
from lightning_otel.traces.store import spans
from lightning_redis.keeper import RedisKeeper
from lightning_redis.store import RedisStore
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource, resource_uses
from lightning_server.tokens import Token, put_token

from tests.plugins.db.gateways import check_state_of_gateways
from tests.servers.redis import RedisServer


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    """A prefix that has no keys yet."""
    return redis_server.url(f"prefix=kept-{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def store(url: str, filled: Callable[..., Any]) -> AsyncIterator[RedisStore]:
    made = RedisStore.from_url(url)
    await made.open()
    await filled(made)
    await put_resource(made, Resource("writer", "Write."))
    await put_resource(made, Resource("writer", "Rhyme."))
    await put_token(made, Token("t1", Scope.RUNNER, "ab" * 32, "lab", "ci", 1000.0, 2000.0))
    yield made
    await made.close()


async def content(store: RedisStore, run: str = "run") -> dict[str, Any]:
    rollouts = (await store.list_rollouts(run)).items
    return {
        "runs": await store.list_runs(),
        "rollouts": rollouts,
        "calls": await store.transitions_of([(rollout.id, 1) for rollout in rollouts]),
        "events": [list((await store.attempts_of([(rollout.id, None)]))[0].tool_events) for rollout in rollouts],
        "extras": [list((await store.attempts_of([(rollout.id, None)]))[0].extras.items()) for rollout in rollouts],
        "spans": [await spans(store, rollout.id) for rollout in rollouts],
        "steps": await store.steps(run),
        "state": await store.get_state(run, "note"),
        "uses": await resource_uses(store, "writer"),
    }


async def test_status(store: RedisStore, url: str) -> None:
    found = await keeper_of(url).status()
    assert (found.runs, found.rollouts, found.steps) == (1, {"succeeded": 9, "failed": 1}, 2)
    assert (found.calls, found.spans, found.resources) == (20, 10, 2)
    assert found.tokens == {"active": 0, "expired": 1, "revoked": 0}
    assert found.bytes is not None
    assert found.bytes > 10_000
    assert found.newest is not None
    assert found.newest > 1e9


async def test_another_schema_is_refused(store: RedisStore, url: str, redis_server: RedisServer) -> None:
    mark = f"{url.partition('prefix=')[2]}:meta"
    redis_server.command("SET", mark, f'{{"program":"lightning","schema":{SCHEMA + 1},"id":"x"}}')
    for act in (keeper_of(url).status, RedisStore.from_url(url).open):
        with pytest.raises(
            SchemaError, match=f"has schema {SCHEMA + 1}, but this version of lightning works with schema {SCHEMA} only"
        ):
            await act()


async def test_a_store_is_made_where_there_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="there is no store at"):
        await with_store(url, lambda opened: opened.list_runs())
    assert await with_store(url, lambda opened: opened.list_runs(), make=True) == []


async def test_pruning(store: RedisStore, url: str) -> None:
    keeper = keeper_of(url)
    before = await content(store)
    plans = await plan(store, keeper, PruneRequest())
    assert (plans[0].groups, plans[0].weight.calls, plans[0].weight.spans) == (
        ("run/1/1", "run/2/1", "run/val/0"),
        12,
        6,
    )
    await carry_out(store, keeper, plans)
    await keeper.vacuum()
    after = await content(store)
    assert after["rollouts"] == before["rollouts"]
    for place, rollout in enumerate(before["rollouts"]):
        for what in ("calls", "events", "spans", "extras"):
            kept = before[what][place] if rollout.trained_at_step is not None else []
            assert after[what][place] == kept
    assert await keeper.weigh("run", ["run/1/1", "nobody"]) == [Weight(), Weight()]
    ended = before["rollouts"][3]
    assert ended.group == "run/1/1"
    with pytest.raises(StoreError, match="it has ended"):
        await store.complete(ended.id, 1, Outcome(reward=9.0))


async def test_a_group_in_which_something_still_runs_keeps_its_calls(store: RedisStore, url: str) -> None:
    await store.create_rollouts([Rollout("late", "run", Task("q"), "run/1/1")])
    await keeper_of(url).forget_calls("run", ["run/1/1"])
    assert len(await store.transitions("run/1/1/0")) == 2


@pytest.mark.parametrize("group", ["run/1/1", "another"])
async def test_a_rollout_that_comes_while_calls_are_removed_keeps_those_of_its_group(
    store: RedisStore, url: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is created, leased, and its call stored against a sibling's, after the keeper has looked at the rollouts."""
    siblings = await store.transitions("run/1/1/0")
    stored: list[Transition] = []
    look = RedisKeeper._members

    async def look_too_early(self: RedisKeeper, *about: Any) -> Any:
        found = await look(self, *about)
        if not stored:
            stored.append(replace(siblings[0], rollout="late", attempt=1))
            await store.create_rollouts([Rollout("late", "run", Task("q"), group)])
            assert len(await store.lease("run", "w", ttl=3600)) == 1
            assert await store.append(stored) == 1
        return found

    monkeypatch.setattr(RedisKeeper, "_members", look_too_early)
    await keeper_of(url).forget_calls("run", ["run/1/1"])
    assert await store.transitions("late") == stored
    assert await store.transitions("run/1/1/0") == (siblings if group == "run/1/1" else [])


async def test_a_new_call_is_not_stored_against_one_that_was_removed(store: RedisStore, url: str) -> None:
    """The process that appends remembers the group's calls; Redis says that they are gone."""
    (known,) = (await store.transitions("run/1/1/0"))[:1]
    await keeper_of(url).forget_calls("run", ["run/1/1"])
    await store.create_rollouts([Rollout("new", "run", Task("q"), "run/1/1")])
    (lease,) = await store.lease("run", "w")
    fresh = type(known)("new", lease.attempt, 0, "c", known.prompt_ids, known.response_ids, known.logprobs)
    assert await store.append([fresh]) == 1
    assert await store.transitions("new") == [fresh]


async def test_whole_runs(store: RedisStore, url: str, filled: Callable[..., Any], redis_server: RedisServer) -> None:
    keeper = keeper_of(url)
    before = await content(store)
    await filled(store, "other")
    await store.create_rollouts([Rollout("o", "other", Task("q"), "g", resources={"writer": 1})])
    await store.lease("other", "w", ttl=3600)
    assert await keeper.busy_runs() == {"other"}
    await store.create_rollouts([Rollout("b", "other", Task("q"), "g", parent=("run/1/0/0", 1, 0))])
    assert await keeper.branched_runs() == {"other"}
    assert set(await keeper.activity()) == {"run", "other"}
    with pytest.raises(StoreError, match="somebody works on run 'other'"):
        await keeper.forget_run("other")
    await store.release("w")
    await keeper.forget_run("other")
    assert await content(store) == before
    prefix = url.partition("prefix=")[2]
    left = redis_server.command("KEYS", f"{prefix}:*other*")
    assert left.startswith(b"*0\r\n")
    assert (await keeper.status()).calls == 20


async def test_what_gateways_keep_of_a_run_goes_with_it(store: RedisStore, url: str) -> None:
    await check_state_of_gateways(store, url)


async def test_copies_are_made_by_redis_itself(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="redis-cli --rdb"):
        await keeper_of(url).backup(tmp_path / "b.db")
    with pytest.raises(ConfigError, match="into PostgreSQL or a file"):
        await keeper_of(url).restore(tmp_path / "b.db")
    assert list(tmp_path.iterdir()) == []


async def test_a_redis_that_is_away_is_named() -> None:
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await keeper_of("redis://127.0.0.1:1/0?timeout=0.1").busy_runs()


async def test_looking_makes_no_store(url: str, redis_server: RedisServer) -> None:
    for look in (keeper_of(url).status(), with_store(url, lambda store: store.list_runs())):
        with pytest.raises(ConfigError, match=r"there is no store at .*prefix=kept-"):
            await look
    assert redis_server.command("KEYS", f"{url.partition('prefix=')[2]}:*") == b"*0\r\n"
