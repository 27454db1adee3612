"""What the runner's tests share: leases, a chat server, and processes that must not be left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from lightning.testing.chat_server import ChatServer
from lightning.types import Lease, Rollout, Task


@pytest.fixture
def lease() -> Callable[..., Lease]:
    """`lease(input)`: the right to run an agent on it."""

    def make(value: object = None, name: str = "rollout-1") -> Lease:
        return Lease(Rollout(name, "run", Task(value), "group", attempt=1), "worker", 0.0)  # type: ignore[arg-type]

    return make


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """`gone(pid)`: whether a process ends, given a minute."""

    def wait(pid: int) -> bool:
        for _ in range(1200):
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return True
            except psutil.NoSuchProcess:
                return True
            time.sleep(0.05)
        return False

    return wait


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Every test ends with the children it began with."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=120)
    assert not alive
