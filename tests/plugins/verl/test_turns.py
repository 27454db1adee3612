"""Calls of the verl engine that meet in different threads, on workers that compute nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.batch.sample import Sample, TokenSpan
from lightning.config import Config, with_settings
from lightning.engines.protocol import Opening, OptimizerConfig
from lightning.errors import EngineError, PolicyServerError, WorkersLostError
from lightning_attach.sending import Meeting
from lightning_verl import engine as module
from lightning_verl.engine import VerlEngine

WAIT = 20.0


class Cluster:
    """Ray and the groups of workers that were made on it."""

    def __init__(self) -> None:
        self.up = False
        self.machines = 1
        self.made: list[Workers] = []
        self.on_start: Callable[[], None] = lambda: None
        self.short: list[str] = []
        """Methods whose workers run out of memory."""

    def connect(self, *_: object) -> bool:
        was, self.up = self.up, True
        return not was

    def shutdown(self) -> None:
        self.up = False

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": False}, *[{"Alive": True}] * self.machines]

    def group(self, *_: object, again: bool) -> Workers:
        self.on_start()
        self.made.append(Workers(self.short))
        return self.made[-1]


class Workers:
    """In the place of `OnRay`: a call of `logprobs` goes on until `free`, or until they are killed."""

    size = 1

    def __init__(self, short: Sequence[str]) -> None:
        self.short, self.budgets = short, list[int]()
        self.calls: list[str] = []
        self.computing, self.free, self.killed = threading.Event(), threading.Event(), False

    def run(self, method: str, parts: Sequence[tuple[Any, ...]], **_: object) -> list[Any]:
        self.calls.append(parts[0][0] if method == "sending" else method)
        if method == "sending":
            return [(Meeting(parts[0][1][1], 4711, 2, 1.0) if self.calls[-1] == "listen" else None, "")]
        if method == "place":
            return [(0, True)]
        if method in self.short:
            self.budgets.append(parts[0][-1])
            raise WorkersLostError(f"out of memory in {method} of the verl engine")
        self.computing.set()
        assert self.free.wait(WAIT)
        if self.killed:
            raise WorkersLostError("a worker died")
        return [[np.zeros(4, np.float32)]]

    def close(self) -> None:
        self.killed = True
        self.free.set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    told = {"worker_group": {"Alone": None, "OnRay": cluster.group, "connect": cluster.connect}}
    told["settings"] = {
        "worker_config": lambda *_, **__: None,
        "teacher_config": lambda *_: None,
        "refuse_holes": lambda _: None,
    }
    for name, content in told.items():
        monkeypatch.setitem(sys.modules, f"lightning_verl.{name}", SimpleNamespace(**content))
    util = SimpleNamespace(get_node_ip_address=lambda: "192.0.2.7")
    ray = SimpleNamespace(shutdown=cluster.shutdown, util=util, nodes=cluster.nodes)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(module, "vocab_size", lambda _: 10)
    return cluster


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[VerlEngine]:
    engine = VerlEngine(with_settings(Config(), {"engine.device": "cpu", "engine.verl.world_size": 1}))
    engine.open(Path("model"), OptimizerConfig(), seed=0)
    yield engine
    engine.close()


@pytest.fixture
def computing(engine: VerlEngine, cluster: Cluster) -> Iterator[Callable[[], Future[Any]]]:
    """Begins a call in another thread."""
    numbers = np.zeros(4, np.float32)
    row = Sample(
        np.zeros(4, np.int32), numbers, numbers, numbers, np.zeros(4, np.int32), (TokenSpan("r", 1, 0, 1, 4),), 1.0
    )
    with ThreadPoolExecutor(1) as threads:
        yield lambda: threads.submit(engine.logprobs, [row])
        cluster.made[-1].free.set()


def test_what_is_closed_during_a_call_stays_closed(
    engine: VerlEngine, cluster: Cluster, computing: Callable[[], Future[Any]]
) -> None:
    call = computing()
    assert cluster.made[0].computing.wait(WAIT)
    engine.close()
    with pytest.raises(EngineError, match="was closed while it computed"):
        call.result(WAIT)
    assert len(cluster.made) == 1
    assert not cluster.up
    with pytest.raises(PolicyServerError, match=r"are gone: .* call open"):
        engine.sender().group()


def test_what_is_closed_while_workers_are_made_again_stays_closed(
    engine: VerlEngine, cluster: Cluster, computing: Callable[[], Future[Any]]
) -> None:
    cluster.on_start = engine.close
    call = computing()
    assert cluster.made[0].computing.wait(WAIT)
    cluster.made[0].close()
    with pytest.raises(EngineError, match="call open"):
        call.result(WAIT)
    assert [workers.killed for workers in cluster.made] == [True, True]
    assert not cluster.up


def test_no_step_gets_into_a_transfer(
    engine: VerlEngine, cluster: Cluster, computing: Callable[[], Future[Any]]
) -> None:
    workers, sender = cluster.made[0], engine.sender()
    assert sender.hold()
    call = computing()
    sender.listen("gloo", "192.0.2.1", 2, 1.0)
    assert not workers.computing.wait(0.05)
    sender.join("word")
    sender.release()
    assert workers.computing.wait(WAIT)
    assert not sender.hold(), "it computes"
    workers.free.set()
    assert call.result(WAIT)[0].shape == (4,)
    assert workers.calls == ["place", "listen", "join", "logprobs"]


def test_a_vllm_on_the_trainers_machine_is_reached_from_where_the_workers_are(
    engine: VerlEngine, cluster: Cluster
) -> None:
    sender = engine.sender()
    assert sender.listen("gloo", "127.0.0.1", 2, 1.0).address == "127.0.0.1"
    cluster.machines = 2
    assert sender.listen("gloo", "127.0.0.1", 2, 1.0).address == "192.0.2.7"
    assert sender.listen("gloo", "192.0.2.1", 2, 1.0).address == "192.0.2.1"


def row(length: int) -> Sample:
    ids, numbers = np.zeros(length, np.int32), np.zeros(length, np.float32)
    return Sample(ids, numbers, numbers, numbers, ids, (TokenSpan("r", 1, 0, 1, length),), 1.0)


def test_a_row_that_is_too_long_by_itself_is_not_tried_again_and_again(cluster: Cluster) -> None:
    settings = {"engine.device": "cpu", "engine.verl.world_size": 1, "engine.tokens_per_microbatch": 20}
    engine = VerlEngine(with_settings(Config(), settings))
    engine.open(Path("model"), OptimizerConfig(), seed=0)
    cluster.short = cluster.made[0].short = ["logprobs"]
    with pytest.raises(EngineError, match=r"one row has 8 tokens: set engine\.gradient_checkpointing .*max_model_len"):
        engine.logprobs([row(4), row(8)])
    assert [workers.budgets for workers in cluster.made] == [[20], [10], [8]]
    engine.close()


def test_a_part_of_a_row_is_the_least_that_a_gpu_computes(cluster: Cluster) -> None:
    settings = {"engine.device": "cpu", "engine.verl.world_size": 1, "engine.tokens_per_microbatch": 2}
    sharing = {"engine.verl.sharding": {"ulysses_sequence_parallel_size": 4}}
    engine = VerlEngine(with_settings(Config(), {**settings, **sharing}))
    engine.open(Path("model"), OptimizerConfig(), seed=0)
    cluster.short = cluster.made[0].short = ["logprobs"]
    with pytest.raises(EngineError, match=r"a GPU's part of one row has 3 tokens: .*ulysses_sequence_parallel_size"):
        engine.logprobs([row(4), row(9)])
    assert [workers.budgets for workers in cluster.made] == [[3]]
    engine.close()


def test_a_shortage_after_which_nothing_is_tried_again_says_what_helps(engine: VerlEngine, cluster: Cluster) -> None:
    cluster.short = cluster.made[0].short = ["logprobs"]
    cure = r"restarts = 3 were used up: lower engine\.tokens_per_microbatch, which is 1024 now, .*engine\.lora"
    with pytest.raises(EngineError, match=cure):
        engine.logprobs([row(4)])
    assert len(cluster.made) == 4


def test_deaths_before_a_step_are_not_held_against_the_workers(
    engine: VerlEngine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3]

    def run(self: Workers, method: str, parts: Sequence[tuple[Any, ...]], **_: object) -> list[Any]:
        if method == "logprobs" and left[0]:
            left[0] -= 1
            raise WorkersLostError("a worker died")
        return [(0, True)] if method == "place" else [[np.zeros(4, np.float32)]]

    monkeypatch.setattr(Workers, "run", run)
    engine.logprobs([row(4)])
    engine.taken, engine.saved, left[0] = module.Taken(1), (Path("state"), module.Taken(1)), 3
    engine.logprobs([row(4)])
    left[0] = 1
    with pytest.raises(EngineError, match=r"restarts = 3 were used up"):
        engine.logprobs([row(4)])
    assert len(cluster.made) == 7


def test_workers_of_several_policies_begin_again_where_each_of_them_was(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless one of them has moved since its last checkpoint."""
    left, seen = [0], list[tuple[Any, ...]]()

    def run(self: Workers, method: str, parts: Sequence[tuple[Any, ...]], **_: object) -> list[Any]:
        seen.append((method, *(parts[0] if method in ("choose", "load") else ())))
        if method == "logprobs" and left[0]:
            left[0] -= 1
            raise WorkersLostError("a worker died")
        return [(0, True)] if method == "place" else [[np.zeros(4, np.float32)]]

    monkeypatch.setattr(Workers, "run", run)
    settings = {"engine.device": "cpu", "engine.verl.world_size": 1, "engine.lora.rank": 2}
    engines = [VerlEngine(with_settings(Config(), settings)) for _ in range(3)]
    first, second, third = engines
    own = Opening(OptimizerConfig(), 0)
    first.open_sharing(Path("model"), own, [(second, own), (third, own)])
    for number, engine in enumerate(engines[1:]):
        engine.taken, engine.saved = module.Taken(1, 1, 0), (Path(f"state-{number}"), module.Taken(1, 1, 0))
    second.logprobs([row(4)])
    left[0] = 1
    second.logprobs([row(4)])
    assert len(cluster.made) == 2
    assert seen == [
        ("place",), ("choose", 1), ("logprobs",), ("logprobs",),
        ("place",), ("choose", 1), ("load", Path("state-0"), 1, 0), ("choose", 2), ("load", Path("state-1"), 1, 0),
        ("choose", 1), ("logprobs",),
    ]  # fmt: skip
    third.taken, left[0] = module.Taken(2, 2, 0), 1
    with pytest.raises(EngineError, match=r"the last checkpoint is older than step 2, .*checkpoint_every = 1"):
        first.logprobs([row(4)])
    third.close()
    with pytest.raises(EngineError, match="call open"):
        first.logprobs([row(4)])
