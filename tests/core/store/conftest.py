"""The stores under test: add a name to `BACKENDS` and a branch to `make_store`, and the whole contract runs against it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from lightning.store import Store
from lightning.store.http import HttpStore
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.testing.control import ControlServer
from lightning.types import Caller, Rollout, Run, Task, Transition, logprobs, token_ids

BACKENDS = ("memory", "sqlite", "http")


@pytest.fixture(scope="session")
def control() -> Iterator[ControlServer]:
    """One server for the clients' views of all stores."""
    with ControlServer() as server:
        yield server


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
        return SqliteStore(tmp_path / f"store-{made}.db")

    yield make
    for url in served:
        request.getfixturevalue("control").remove(url)


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
