"""A head of somebody's own: an engine trains it beside the policy, asks it for values and keeps it under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from lightning.algorithms.protocol import head_of
from lightning.batch import Sample
from lightning.config import Config
from lightning.engines.protocol import Head, OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, EngineError, PluginError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import LossOutput
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.model import made_head
from safetensors.torch import load_file
from torch import nn

Make = Callable[..., Sample]
LOSS = ClippedPolicyGradient(correction=NO_CORRECTION)


class Sums(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.detach().float() * self.scale).sum(-1)


@dataclass(frozen=True)
class Distance:
    """A head that learns by the absolute error."""

    lr: float = 0.5
    name = "distance"
    trains_model = False

    def __str__(self) -> str:
        return f"distance at {self.lr}"

    def module(self, model: nn.Module, *, dtype: torch.dtype, device: torch.device | str | int) -> nn.Module:
        return Sums(model.get_output_embeddings().weight.shape[1]).to(device)  # type: ignore[operator, union-attr, index]

    def loss(
        self, values: torch.Tensor, targets: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]
    ) -> LossOutput:
        goals, shares = (torch.as_tensor(part).to(values) for part in (targets, weights))
        lost = (shares * (values - goals).abs()).sum()
        return LossOutput(lost, {"lost": float(lost.detach()), "states": float(len(goals))})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {f"distance_{name}": value for name, value in sums.items()}


def opened(model: Path, head: Head | None) -> TorchEngine:
    engine = TorchEngine(device="cpu", tokens_per_microbatch=12)
    engine.open(model, OptimizerConfig(lr=1e-3), seed=0, head=head)
    return engine


@pytest.fixture
def rows(make_row: Make) -> list[Sample]:
    """Four rows with one state each, which should be worth 2."""
    made = [make_row(8, [(4, 8, 1.0, 0.1)], seed=seed, name=f"r{seed}") for seed in range(4)]
    return [replace(row, spans=(replace(row.spans[0], value_target=2.0, value_weight=0.25),)) for row in made]


def test_its_loss_metrics_and_rate_are_its_own(model: Path, rows: list[Sample]) -> None:
    engine = opened(model, Distance())
    metrics = engine.step(rows, LOSS, 5e-4).metrics
    assert (metrics["distance_lost"], metrics["distance_states"]) == (2.0, 4.0)
    assert metrics["distance_grad_norm"] > 0
    assert "value_loss" not in metrics
    moved = engine._learning()["distance.scale"].abs()
    torch.testing.assert_close(moved[moved > 0.2], torch.full_like(moved[moved > 0.2], 0.25), rtol=1e-3, atol=0)
    assert np.concatenate(engine.values(rows)).any()
    engine.close()


def test_a_state_is_read_by_an_engine_with_the_same_head(model: Path, rows: list[Sample], tmp_path: Path) -> None:
    engine, other, plain = opened(model, Distance()), opened(model, Distance(lr=0.1)), opened(model, None)
    engine.step(rows, LOSS)
    engine.save(tmp_path / "state")
    assert "distance.scale" in load_file(tmp_path / "state" / "weights.safetensors")
    for wrong, said in ((other, "opened with a distance at 0.1"), (plain, "opened without a head")):
        with pytest.raises(EngineError, match=f"saved with a distance at 0.5, but this engine was {said}"):
            wrong.load(tmp_path / "state")
        wrong.close()
    engine.load(tmp_path / "state")
    engine.close()


class Uses:
    """An algorithm that names its head."""

    name, group_size, loss = "uses", 2, LOSS

    def __init__(self, head: str | None) -> None:
        self.head = head


def test_a_run_has_one_head() -> None:
    phases = tuple((step, Uses(head)) for step, head in enumerate(("", "one", None, "one"), start=1))
    assert [head_of(algorithm) for _, algorithm in phases] == ["", "one", "", "one"]  # type: ignore[arg-type]
    assert AlgorithmSchedule(phases).head == "one"  # type: ignore[arg-type]
    assert AlgorithmSchedule(phases[:1]).head == ""  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"an engine has one head, but .* use several: one, other"):
        _ = AlgorithmSchedule((*phases, (5, Uses("other")))).head  # type: ignore[arg-type]


def test_a_head_that_no_plugin_has_is_refused_by_name() -> None:
    assert made_head(Config(), None) is made_head(Config(), "") is None
    with pytest.raises(PluginError, match="there is no head 'nobodys'"):
        made_head(Config(), "nobodys on a frozen trunk")
