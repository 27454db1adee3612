"""Stores under test, as fixtures: name one more in `backends.py` and `make_store`, and the whole contract runs against it."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lightning.store import Store, sqlite_url
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.types import Caller, Rollout, Run, Task, Transition, logprobs, token_ids
from lightning_server.http_store import HttpStore

from tests.core.store.backends import BACKENDS

if TYPE_CHECKING:  # the environment of frameworks has no client of these servers
    from lightning_redis.store import RedisStore

    from tests.servers.postgres import PostgresServer
    from tests.servers.redis import RedisServer


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Each call gives the URL of an empty store. A schema takes longer to make than a test: it is used again."""
    taken: list[str] = []

    def take() -> str:
        taken.append(postgres_server.empty.pop() if postgres_server.empty else f"test_{uuid.uuid4().hex}")
        return postgres_server.url_of(taken[-1], pool=4, timeout=20, ssl="disable")

    yield take
    asyncio.run(postgres_server.clear(taken))


def redis_store(server: RedisServer) -> RedisStore:
    """An empty store of this server that is not open yet."""
    from lightning_redis.store import RedisStore

    return RedisStore.from_url(server.url(f"prefix=test-{uuid.uuid4().hex}"))


@pytest.fixture(params=BACKENDS)
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Each call makes an empty store that is not open yet."""
    made = 0
    served: list[str] = []

    def make() -> Store:
        nonlocal made
        made += 1
        if request.param == "memory":
            return MemoryStore()
        if request.param == "http":
            url, token = request.getfixturevalue("control").add(MemoryStore())
            served.append(url)
            return HttpStore(url, token=token)
        if request.param == "postgres":
            from lightning_postgres.store import PostgresStore

            return PostgresStore.from_url(request.getfixturevalue("postgres_url")())
        if request.param == "redis":
            return redis_store(request.getfixturevalue("redis_server"))
        return SqliteStore(tmp_path / f"store-{made}.db")

    yield make
    for url in served:
        request.getfixturevalue("control").remove(url)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store that other processes can open too."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url")())
    return sqlite_url(tmp_path / "store.db")


def is_served(store: Store) -> bool:
    """Whether a server stands before what keeps the data."""
    return isinstance(store, HttpStore)


@pytest.fixture
async def store(make_store: Callable[[], Store]) -> AsyncIterator[Store]:
    """An open store with the run `run`."""
    made = make_store()
    await made.open()
    await made.put_run(Run("run", "a run"))
    yield made
    await made.close()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """An open SQLite store with the run `run`, for what only a file can show."""
    made = SqliteStore(tmp_path / "store.db")
    await made.open()
    await made.put_run(Run("run", "a run"))
    yield made
    await made.close()


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    def make(name: str = "a", **changes: object) -> Rollout:
        fields: dict[str, object] = {
            "id": name,
            "run": "run",
            "task": Task({"question": name}),
            "group": "g",
            **changes,
        }
        return Rollout(**fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def call() -> Callable[..., Transition]:
    """A model call of rollout `a`, attempt 1."""

    def make(seq: int = 0, prompt: object = (1, 2, 3), response: object = (4, 5), **changes: object) -> Transition:
        fields: dict[str, object] = {
            "rollout": "a",
            "attempt": 1,
            "seq": seq,
            "id": f"call-{seq}",
            "prompt_ids": token_ids(list(prompt)),  # type: ignore[call-overload]
            "response_ids": token_ids(list(response)),  # type: ignore[call-overload]
            "logprobs": logprobs([-0.5] * len(list(response))),  # type: ignore[call-overload]
            "caller": Caller("writer", ("root", "writer"), "span"),
            **changes,
        }
        return Transition(**fields)  # type: ignore[arg-type]

    return make


BranchedIn = Callable[[Store], Awaitable[tuple[list[Transition], dict[str, list[Transition]]]]]
"""Returns the calls of a trunk, and those of branches by their rollouts."""


@pytest.fixture
def branched(rollout: Callable[..., Rollout], call: Callable[..., Transition]) -> BranchedIn:
    """Appends a trunk `a` of two agents that take turns, and branches at the second one's second call: `b0` and `b1` of its
    group, and `far`. `b2` is leased, too, and has no call yet."""

    async def append(store: Store) -> tuple[list[Transition], dict[str, list[Transition]]]:
        branches = [rollout(f"b{i}", parent=("a", 1, 3)) for i in range(3)]
        await store.create_rollouts([rollout("a"), *branches, rollout("far", group="other", parent=("a", 1, 3))])
        await store.lease("run", "w", limit=5, ttl=3600)
        dice = random.Random(0)
        first, second, third = ([dice.randrange(150_000) for _ in range(1000)] for _ in range(3))
        later = [4, 5, 9, *third]
        turns = [call(0, first), call(1, second), call(2, [*first, *later]), call(3, [*second, *later])]
        await store.append(turns)
        own = [[*second, *later], [*first, *later, 4, 5, 8]]
        live = {
            name: [call(3 + at, prompt, [6], rollout=name) for at, prompt in enumerate(own)]
            for name in ("b0", "b1", "far")
        }
        for calls in live.values():
            await store.append(calls)
        return turns, live

    return append


@pytest.fixture
def make_redis(redis_server: RedisServer) -> Callable[[], RedisStore]:
    """Each call makes an empty Redis store that is not open yet."""
    return lambda: redis_store(redis_server)
