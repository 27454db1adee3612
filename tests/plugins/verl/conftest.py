"""Verl engines in this process and on a local Ray, and the torch engine beside them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import chain
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from lightning.batch import Ragged, Sample, SamplingMask
from lightning.config import Config, LoraConfig, with_settings
from lightning.engines.protocol import Engine, OptimizerConfig
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import SequencePolicyGradient
from lightning.plugins import plugins
from lightning.testing.tiny_models import make_tiny_model
from lightning_policies.engine import PolicyEngine, TrainedPolicy
from lightning_verl.device import choose
from lightning_verl.plugin import verl_engine

from tests.plugins.verl.own_loss import LOSS as LOSS

VOCAB = 320
OpenVerl = Callable[..., Engine]
ALONE = 0
"""The world size of a job in this process."""
CALLS = SequencePolicyGradient(0.9, 9.0, kl_coefficient=0.1, kl_estimator="k3", correction=NO_CORRECTION)
"""Wants to know everything before the gradient pass: the current policy's logprobs, and the reference's."""

UNCLIPPED = OptimizerConfig(lr=1e-3, max_grad_norm=1e9, weight_decay=0.5, eps=1e-5)
"""`eps` is above the rounding of these gradients: below it, AdamW makes whole updates of how two kernels round."""
POLICIES = {
    "editor": TrainedPolicy(LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))),
    "writer": TrainedPolicy(LoraConfig(rank=4, alpha=8), lr=2e-3),
}
OpenPolicies = Callable[..., PolicyEngine]


def masked(samples: Sequence[Sample]) -> list[Sample]:
    """The rows; every second one with sampling masks."""
    return [
        replace(sample, mask=random_mask(sample.ids, seed)) if seed % 2 == 0 else sample
        for seed, sample in enumerate(samples)
    ]


def random_mask(tokens: npt.NDArray[np.integer], seed: int, words: int = VOCAB) -> SamplingMask:
    """Masks of every kind of these tokens: few ids kept, few or none left out, and biases."""
    dice = np.random.default_rng(seed)
    is_left_out, ids, biased = dice.random(len(tokens)) < 0.7, list[list[int]](), list[list[int]]()
    for own, token in zip(is_left_out, tokens, strict=True):
        some = {int(each) for each in dice.integers(0, words, 5) if dice.random() < 0.8} - {int(token)}
        ids.append(sorted(some if own else {*some, int(token)}))
        biased.append(sorted({*dice.integers(0, words, 2).tolist()}) if dice.random() < 0.5 else [])
    left, added = ragged(ids), ragged(biased)
    return SamplingMask(words, is_left_out, left, replace(added, values=np.full(len(added.ids), 1.0, np.float32)))


def ragged(lists: Sequence[Sequence[int]]) -> Ragged:
    ids = np.fromiter(chain.from_iterable(lists), np.int32)
    return Ragged(np.arange(len(lists)), np.cumsum([0, *map(len, lists)]), ids)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen3 of two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", vocab=VOCAB)


@pytest.fixture
def open_verl(model: Path) -> Iterator[OpenVerl]:
    """`open_verl(world_size, folder=..., optimizer=..., seed=..., critic=..., **settings of the engine section)`."""
    opened: list[Engine] = []

    def make(
        world_size: int,
        *,
        folder: Path = model,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3),  # noqa: B008 — it is frozen
        seed: int = 0,
        critic: bool = False,
        reference: Path | None = None,
        **settings: object,
    ) -> Engine:
        plain = {
            name: value.model_dump() if isinstance(value, LoraConfig) else value for name, value in settings.items()
        }
        names = {f"engine.{name}": value for name, value in plain.items()}
        config = with_settings(Config(), {"engine.device": "cpu", "engine.verl.world_size": world_size, **names})
        engine = verl_engine(config)
        opened.append(engine)
        head = plugins().get("heads", "critic")(config) if critic else None
        engine.open(folder, optimizer, seed=seed, head=head, reference=reference)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def open_policies(model: Path) -> Iterator[OpenPolicies]:
    """`open_policies(make, critic=..., optimizer=..., **settings of the section engine)`; closed at the end."""
    opened: list[PolicyEngine] = []

    def make(
        factory: Callable[[Config], Engine],
        *,
        critic: bool = False,
        optimizer: OptimizerConfig = UNCLIPPED,
        **settings: object,
    ) -> PolicyEngine:
        config = with_settings(
            Config(), {"engine.device": "cpu", **{f"engine.{name}": value for name, value in settings.items()}}
        )
        engine = PolicyEngine(POLICIES, factory, config)
        opened.append(engine)
        head = plugins().get("heads", "critic")(config) if critic else None
        engine.open(model, optimizer, seed=0, head=head)
        return engine

    yield make
    for engine in opened:
        engine.close()


class TwoProcesses:
    """In the place of `OnRay`: two ranks on this machine, whose processes stay for the next job."""

    size = 2

    def __init__(self, wires: Sequence[Connection], made: object, arguments: Mapping[str, object]) -> None:
        self._wires, self._open = wires, True
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.run("make", [(made,)] * 2, port=port, **arguments)

    def run(self, method: str, parts: Sequence[tuple[object, ...]], **named: object) -> list[object]:
        """See `Group.run`."""
        for wire, part in zip(self._wires, parts, strict=True):
            wire.send((method, part, named))
        return [wire.recv() for wire in self._wires]

    def close(self) -> None:
        """See `Group.close`."""
        if self._open:
            self._open = False
            self.run("end", [()] * 2)


@pytest.fixture(scope="module")
def wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    """Connections to the two processes, by rank."""
    address = str(tmp_path_factory.mktemp("wire") / "s")
    program = Path(__file__).with_name("rank_process.py")
    with Listener(address, family="AF_UNIX") as listener:
        found = {**os.environ, "PYTHONPATH": str(program.parents[3])}  # for a loss of the tests
        asked = [[sys.executable, str(program), address, str(rank)] for rank in range(2)]
        processes = [subprocess.Popen(each, env=found) for each in asked]
        accepted = [listener.accept() for _ in processes]
        yield [wire for _, wire in sorted(((wire.recv(), wire) for wire in accepted), key=lambda pair: pair[0])]
        for wire in accepted:
            wire.send(None)
        for process in processes:
            process.wait(60)


@pytest.fixture
def two_processes(wires: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    choose("cpu")
    group = import_module("lightning_verl.worker_group")
    monkeypatch.setattr(group, "connect", lambda *_: False)
    monkeypatch.setattr(group, "OnRay", lambda _, made, arguments, *__, **___: TwoProcesses(wires, made, arguments))
