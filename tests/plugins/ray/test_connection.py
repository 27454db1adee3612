"""The one connection of a process to Ray: begun once, and ended by who began it. No Ray starts here."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable

import pytest
from lightning.config import RunnerConfig
from lightning.errors import RunnerError
from lightning_ray.cluster import RayCluster, connect
from lightning_ray.connection import begin

WAIT = 20.0


class Ray:
    """In the place of the module. `on_init` is what happens while a connection is begun."""

    def __init__(self) -> None:
        self.up, self.asked = False, list[str]()
        self.on_init: Callable[[], None] = lambda: None

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **_: object) -> None:
        self.asked.append("init")
        self.on_init()
        self.up = True

    def shutdown(self) -> None:
        self.asked.append("shutdown")
        self.up = False

    def kill(self, actor: object, **_: object) -> None:
        self.asked.append("kill")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def test_who_asks_while_a_connection_is_begun_gets_that_one(ray: Ray) -> None:
    found = list[bool]()
    other = threading.Thread(target=lambda: found.append(begin(ray)))

    def meanwhile() -> None:
        other.start()
        other.join(0.05)
        assert other.is_alive(), "it does not look before there is something to see"

    ray.on_init = meanwhile
    assert begin(ray)
    other.join(WAIT)
    assert (found, ray.asked) == ([False], ["init"])


def test_what_a_failed_start_left_is_ended_but_never_what_others_began(ray: Ray) -> None:
    def fails() -> None:
        raise RuntimeError("too busy")

    ray.on_init = fails
    with pytest.raises(RuntimeError):
        begin(ray)
    assert ray.asked == ["init", "shutdown"]

    def too_late() -> None:
        ray.up = True  # by the program itself
        raise RuntimeError("Maybe you called ray.init twice by accident?")

    ray.on_init = too_late
    with pytest.raises(RuntimeError):
        begin(ray)
    assert ray.asked == ["init", "shutdown", "init"]


async def test_the_runner_ends_its_own_connection_only(ray: Ray) -> None:
    own, guest = await connect(RunnerConfig()), await connect(RunnerConfig())
    await guest.close()
    assert ray.asked == ["init"]
    await own.close()
    own.kill("an actor")  # would begin a new connection
    assert ray.asked == ["init", "shutdown"]
    ray.on_init = lambda: (_ for _ in ()).throw(OSError("no such cluster"))
    with pytest.raises(RunnerError, match="no Ray cluster at this machine: no such cluster"):
        await connect(RunnerConfig())


@pytest.mark.parametrize("others", [False, True])
async def test_a_start_that_is_cancelled_is_ended_if_it_was_one(ray: Ray, others: bool) -> None:
    entered, goes_on, left = threading.Event(), threading.Event(), threading.Event()

    def is_initialized() -> bool:
        entered.set()
        goes_on.wait(WAIT)
        ray.up = ray.up or others
        return ray.up

    ray.is_initialized = is_initialized  # type: ignore[method-assign]
    ray.shutdown = left.set  # type: ignore[method-assign]
    starting: asyncio.Task[RayCluster] = asyncio.create_task(connect(RunnerConfig()))
    assert await asyncio.to_thread(entered.wait, WAIT)
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("lightning-ray")]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    goes_on.set()
    await asyncio.to_thread(thread.join, WAIT)
    assert (ray.asked, left.is_set()) == (([], False) if others else (["init"], True))
