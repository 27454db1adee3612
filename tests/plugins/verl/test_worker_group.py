"""A local Ray that does not start at once, and workers that end in other ways than by an error of theirs."""

from __future__ import annotations

import asyncio
import logging
import threading
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import ConfigError, EngineError, WorkersLostError
from lightning_ray import cluster
from lightning_verl.config import VerlConfig
from lightning_verl.device import choose

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow  # what the group imports of verl takes seconds, although no Ray starts


@pytest.fixture
def group() -> Any:
    """The module."""
    choose("cpu")  # before verl is imported, by whichever test is the first to do so
    return import_module("lightning_verl.worker_group")


@pytest.mark.parametrize("kind", [Exception, RuntimeError])
@pytest.mark.parametrize("failures", [1, 2])
def test_ray_is_started_once_more(
    group: Any, failures: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def init(**how: Any) -> None:
        asked.append("init")
        if asked.count("init") <= failures:
            raise kind("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shutdown"))
    if failures == 1:
        assert group.connect(VerlConfig(), "cpu")
    else:
        with pytest.raises(EngineError, match=r"did not start on this machine, twice: The current node timed out"):
            group.connect(VerlConfig(), "cpu")
    assert asked == ["init", "shutdown", "init", "shutdown"][: 2 + failures]


def test_a_cluster_that_is_not_there_is_named(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**how: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ConfigError, match=r"engine\.verl\.address = '192\.0\.2\.1:6379': nobody answers"):
        group.connect(VerlConfig(address="192.0.2.1:6379"), "cpu")


def test_the_runners_connection_is_used_also_when_both_begin_at_once(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, found = list[str](), list[bool]()
    config = VerlConfig(address="192.0.2.1:6379")
    engine = threading.Thread(target=lambda: found.append(group.connect(config, "cpu")))

    def init(**how: Any) -> None:
        asked.append("init")
        engine.start()
        engine.join(0.05)
        up.set()

    up = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", up.is_set)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="192.0.2.2:6379"))
    with caplog.at_level(logging.WARNING):
        made = asyncio.run(cluster.connect(RunnerConfig()))
        engine.join(20.0)
    assert (found, asked) == ([False], ["init"])
    assert "192.0.2.1:6379 was not used: this process is connected to the Ray cluster at 192.0.2.2:6379" in caplog.text
    asyncio.run(made.close())
    assert asked == ["init", "shutdown"]


class Actors:
    """In the place of Ray with workers whose every answer is an error: one for each."""

    exceptions = ray.exceptions

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.up, self.killed = errors, True, list[object]()

    def is_initialized(self) -> bool:
        return self.up

    def wait(self, waiting: list[object], num_returns: int, **_: object) -> tuple[list[object], list[object]]:
        return waiting[:num_returns], waiting[num_returns:]

    def get(self, asked: Any) -> None:
        raise self.errors[asked[0] if isinstance(asked, list) else asked]

    def kill(self, actor: object, **_: object) -> None:
        self.killed.append(actor)


def on(group: Any, actors: Actors) -> Any:
    made = group.OnRay.__new__(group.OnRay)
    workers = [SimpleNamespace(step=SimpleNamespace(remote=lambda n=n: n)) for n in range(len(actors.errors))]
    made.size, made._ray, made._workers, made._pool = len(workers), actors, workers, SimpleNamespace(pgs=[])
    return made


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ray.exceptions.OutOfMemoryError("15 of 16 GB"), "^out of memory on a worker's machine in step: 15 of 16 GB"),
        (ray.exceptions.RpcError("no route"), "Ray lost a worker of the verl engine in step: no route"),
        (ray.exceptions.RayActorError(error_msg="it died"), "a worker of the verl engine died in step: it died"),
    ],
)
def test_what_ray_does_to_a_worker_ends_all(group: Any, error: Exception, message: str) -> None:
    """So that the engine makes them again."""
    workers = on(group, actors := Actors(error))
    with pytest.raises(WorkersLostError, match=message):
        workers.run("step", [()])
    assert len(actors.killed) == 1
    with pytest.raises(EngineError, match="resume the run"):
        workers.run("step", [()])


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ((ray.exceptions.RayActorError(error_msg="killed"),), "a worker of the verl engine died in step: killed"),
        (
            (ray.exceptions.RayTaskError("step", "reset", OSError()), ray.exceptions.RayActorError(error_msg="gone")),
            "gone",
        ),
        ((ray.exceptions.NodeDiedError("its machine"),), "a worker of the verl engine died in step: its machine"),
        ((ray.exceptions.OutOfMemoryError("15 GB"),), "out of memory on a worker's machine in step: 15 GB"),
        (
            (ray.exceptions.RayTaskError("step", "CUDA out of memory", RuntimeError("out of memory")),),
            "^out of memory in",
        ),
        ((ray.exceptions.RayTaskError("step", "mistake", ValueError()),), ""),
        ((), ""),
    ],
)
def test_a_worker_that_died_is_told_from_neighbours_that_failed_because_of_it(
    group: Any, others: tuple[Exception, ...], lost: str
) -> None:
    """Their collective breaks off, and Ray may tell of that first."""
    first = ray.exceptions.RayTaskError("step", "Connection reset by peer", RuntimeError())
    workers = on(group, Actors(first, *others))
    with pytest.raises(EngineError, match=lost or "step failed on a worker of the verl engine") as found:
        workers.run("step", [()] * (1 + len(others)))
    assert isinstance(found.value, WorkersLostError) is bool(lost)


def test_where_ray_has_ended_nothing_is_asked_of_it(group: Any) -> None:
    """It would start again for that."""
    workers = on(group, actors := Actors(RuntimeError()))
    actors.up = False
    workers.close()
    assert not actors.killed


class Worker:
    """In the place of `PolicyWorker`, with a process group as it has; `fails` are the methods that do."""

    def __init__(self, fails: dict[str, Exception]) -> None:
        self.fails = fails
        dist.init_process_group("gloo", rank=0, world_size=1)
        self.does("__init__")

    def does(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    def accumulate(self) -> None:
        self.does("accumulate")

    def end(self) -> None:
        self.does("end")


def test_a_failure_in_this_process_leaves_no_group_behind(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "PolicyWorker", Worker)
    with pytest.raises(EngineError, match=r"^the start of the verl engine failed: OSError\('no file'\)"):
        group.Alone({"__init__": OSError("no file")}, {})
    assert not dist.is_initialized()
    alone = group.Alone({"accumulate": RuntimeError("CUDA out of memory"), "end": OSError("no end")}, {})
    cure = r"^out of memory in accumulate .*: lower engine\.tokens_per_microbatch or .*; or leave .* more of the device"
    with pytest.raises(EngineError, match=cure):
        alone.run("accumulate", [()])
    assert dist.is_initialized()
    with pytest.raises(EngineError, match="the end of the verl engine failed"):
        alone.close()
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-verl")]


def test_a_second_one_in_this_process_is_refused_until_the_first_has_ended(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute in the first one's process groups, and lose them."""
    monkeypatch.setattr(group, "PolicyWorker", Worker)
    first = group.Alone({}, {})
    with pytest.raises(EngineError, match=r"another verl engine is open .* close that one .*world_size = 1"):
        group.Alone({}, {})
    assert dist.is_initialized(), "the first one's"
    first.close()
    second = group.Alone({}, {})
    first.close()
    assert dist.is_initialized(), "the second one's: a first one that has ended ends nothing again"
    second.close()
    assert not dist.is_initialized()
