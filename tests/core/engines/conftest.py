"""Tiny models, rows for them, and engines that give their memory back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample, TokenSpan
from lightning.config.plugin_settings import Config, EngineConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.plugins import plugins
from lightning.testing.tiny_models import make_tiny_model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

VOCAB = 320

OpenEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen3 of two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", vocab=VOCAB)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", vocab=VOCAB, tied=True)


@pytest.fixture
def open_engine(model: Path) -> Iterator[OpenEngine]:
    """`open_engine(folder=..., lr=..., critic_lr=..., seed=..., critic=..., critic_trunk=..., **engine arguments)`; closed when
    the test ends."""
    opened: list[TorchEngine] = []

    def make(
        folder: Path = model,
        *,
        lr: float = 1e-3,
        critic_lr: float = 1e-2,
        seed: int = 0,
        critic: bool = False,
        critic_trunk: Literal["frozen", "shared"] = "frozen",
        **arguments: object,
    ) -> TorchEngine:
        engine = TorchEngine(device="cpu", **arguments)  # type: ignore[arg-type]
        settings = Config(engine=EngineConfig(critic_lr=critic_lr, critic_trunk=critic_trunk))
        head = plugins().get("heads", "critic")(settings) if critic else None
        engine.open(folder, OptimizerConfig(lr=lr), seed=seed, head=head)
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def exact_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's norm in the dtype it is given: transformers' own rounds to float32, also in a float64 model."""

    def forward(self: Qwen3RMSNorm, states: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * states * scale

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


MakeRow = Callable[..., Sample]


@pytest.fixture
def make_row() -> MakeRow:
    """`make_row(length, [(start, stop, advantage, weight), ...], seed=..., name=..., temperature=..., logprob=...)`."""

    def make(
        length: int,
        parts: Sequence[tuple[int, int, float, float]],
        *,
        seed: int = 0,
        name: str = "r",
        temperature: float = 1.0,
        logprob: float = float("nan"),
    ) -> Sample:
        generator = np.random.default_rng(seed)
        weights, advantages = np.zeros(length, np.float32), np.zeros(length, np.float32)
        logprobs, versions = np.full(length, np.nan, np.float32), np.full(length, -1, np.int32)
        for start, stop, advantage, weight in parts:
            weights[start:stop], advantages[start:stop] = weight, advantage
            logprobs[start:stop], versions[start:stop] = logprob, 0
        return Sample(
            generator.integers(0, VOCAB, length).astype(np.int32),
            weights,
            advantages,
            logprobs,
            versions,
            tuple(TokenSpan(name, 1, seq, start, stop) for seq, (start, stop, _, _) in enumerate(parts)),
            temperature,
        )

    return make
