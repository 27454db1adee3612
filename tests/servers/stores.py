"""Stores under test, as fixtures: name one more in `backends.py` and `make_store`, and the whole contract runs against it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from lightning.store import Store, sqlite_url
from lightning.store.http import HttpStore
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.types import Caller, Rollout, Run, Task, Transition, logprobs, token_ids
from lightning_postgres.store import PostgresStore
from lightning_redis.store import RedisStore

from tests.core.store.backends import BACKENDS
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
            return PostgresStore.from_url(request.getfixturevalue("postgres_url")())
        if request.param == "redis":
            server = request.getfixturevalue("redis_server")
            return RedisStore.from_url(server.url(f"prefix=test-{uuid.uuid4().hex}"))
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


@pytest.fixture
def make_redis(redis_server: RedisServer) -> Callable[[], RedisStore]:
    """Each call makes an empty Redis store that is not open yet."""
    return lambda: RedisStore.from_url(redis_server.url(f"prefix=test-{uuid.uuid4().hex}"))
