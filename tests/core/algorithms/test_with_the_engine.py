"""Every algorithm through the real engine: a few steps on the same rollouts make the better ones likelier than the worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lightning import DPO, SFT
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS
from lightning.algorithms.protocol import Algorithm, head_of
from lightning.batch.build import build_samples, state_rows, with_values
from lightning.batch.trajectory import Group
from lightning.config import Config
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.testing.tiny_models import make_tiny_model
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.model import made_head
from lightning.types import logprobs

VOCAB = 320
ALGORITHMS: dict[str, Algorithm] = {
    **{name: LightningRL(name) for name in PRESETS},
    "dpo": DPO(beta=1.0),
    "sft": SFT(),
    "kl": LightningRL("grpo", kl_coefficient=0.01),
    "tis": LightningRL("gspo", correction="tis"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab=VOCAB)


@pytest.fixture
def engine() -> Iterator[TorchEngine]:
    engine = TorchEngine(device="cpu")
    yield engine
    engine.close()


def sampled(engine: TorchEngine) -> list[Group]:
    """Two groups of two rollouts of two calls each, with the logprobs that the engine itself gives."""
    numbers = np.random.default_rng(0)
    groups = []
    for name in "ab":
        members = []
        for index, reward in enumerate((1.0, 0.0)):
            calls = [(numbers.integers(0, VOCAB, 4).tolist(), numbers.integers(0, VOCAB, 3).tolist()) for _ in range(2)]
            member = make_trajectory(calls, rollout=f"{name}/{index}", group=name, index=index, reward=reward)
            rows = build_samples([member], [np.ones(2)])
            found = {
                span.seq: values[span.start : span.stop]
                for row, values in zip(rows, engine.logprobs(rows), strict=True)
                for span in row.spans
            }
            own = tuple(replace(call, logprobs=logprobs(found[call.seq].tolist())) for call in member.transitions)
            members.append(replace(member, transitions=own))
        groups.append(Group(name, tuple(members)))
    return groups


def lead(engine: TorchEngine, groups: list[Group]) -> float:
    """How much likelier the better rollouts are than the worse, in nats."""
    total = 0.0
    for group in groups:
        for member in group.trajectories:
            rows = build_samples([member], [np.ones(2)])
            likelihood = sum(
                float(values[row.weights != 0].sum()) for row, values in zip(rows, engine.logprobs(rows), strict=True)
            )
            total += likelihood if member.reward else -likelihood
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_few_steps_prefer_the_better_rollouts(name: str, folder: Path, engine: TorchEngine) -> None:
    algorithm = ALGORITHMS[name]
    head = made_head(Config(), head_of(algorithm))
    engine.open(folder, OptimizerConfig(lr=3e-4), seed=0, head=head)
    groups = sampled(engine)
    before = lead(engine, groups)
    first = None
    for _ in range(3):
        known = groups
        if head_of(algorithm):
            rows = state_rows(groups)
            values = zip(rows, engine.values(rows), strict=True)
            known = with_values(
                groups,
                {
                    (span.rollout, span.attempt, span.seq): float(value)
                    for row, own in values
                    for span, value in zip(row.spans, own, strict=True)
                },
            )
        batch = algorithm.batch(known)
        result = engine.step(batch.samples, batch.loss_for(algorithm))
        assert result.metrics["stepped"] == 1.0
        assert all(map(math.isfinite, result.metrics.values()))
        first = first or result.metrics
    assert lead(engine, groups) > before + 0.05
    assert first is not None
    if name == "dpo":  # the policy is the reference yet
        assert (first["loss"], first["dpo_margin"]) == pytest.approx((math.log(2), 0.0), abs=1e-5)
    if name == "kl":
        assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
        assert result.metrics["reference_kl"] > 0.0
    if name == "tis":
        assert first["correction_weight"] == pytest.approx(1.0, abs=1e-5)
    if name == "gspo":
        assert result.metrics["clip_fraction"] > 0.5  # on the same rollouts for the third time
