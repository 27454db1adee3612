"""Adapters of several policies on one base in verl's workers: the numbers are those of the torch engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.batch.sample import Sample
from lightning.config import Config, LoraConfig, with_settings
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import Engine, OptimizerConfig
from lightning.losses.protocol import Loss
from lightning.plugins import plugins
from lightning_policies.engine import PolicyEngine, TrainedPolicy
from lightning_verl.plugin import verl_engine
from safetensors.torch import load_file

from tests.plugins.verl.conftest import ALONE, CALLS, LOSS
from tests.plugins.verl.test_engine import UNCLIPPED, assert_equal, gradient, rows, valued

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # verl's own
POLICIES = {
    "editor": TrainedPolicy(LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))),
    "writer": TrainedPolicy(LoraConfig(rank=4, alpha=8), lr=2e-3),
}
Open = Callable[..., PolicyEngine]


@pytest.fixture
def open_policies(model: Path) -> Iterator[Open]:
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


def mixed(seed: int, **how: Any) -> list[Sample]:
    """Rows of both policies, in turn."""
    return [replace(row, policy=("writer", "editor")[place % 2]) for place, row in enumerate(rows(seed, **how))]


def compare(verl: PolicyEngine, plain: PolicyEngine, folder: Path) -> None:
    """Logprobs, values, metrics, gradients and weights, over steps of both policies and of one."""
    losses: Sequence[Loss] = (LOSS, CALLS, LOSS, LOSS)
    for number, loss in enumerate(losses):
        batch = valued(mixed(number, temperature=0.7 if number == 2 else 1.0))
        if number == 3:
            batch = [row for row in batch if row.policy == "editor"]
        assert_equal(verl.logprobs(batch), plain.logprobs(batch))
        assert_equal(verl.values(batch), plain.values(batch))
        found, expected = verl.step(batch, loss), plain.step(batch, loss)
        assert found.seen == expected.seen
        assert ("policy/writer/gradient_share" in found.metrics) == (number < 3)
        for name in {*expected.metrics} - {"microbatches", "tokens_forward", "tree"}:
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=2e-4, abs=1e-5), name
        if number == 0:
            verl.save(folder / "verl")
            plain.save(folder / "torch")
            for policy in POLICIES:
                mine, theirs = gradient(folder / "verl" / policy), gradient(folder / "torch" / policy)
                mine = {name.replace(".policy_1.", ".default."): value for name, value in mine.items()}
                assert mine.keys() == theirs.keys()
                for name, value in theirs.items():
                    assert float((mine[name] - value).abs().max()) <= 1e-5 * max(1.0, float(value.abs().max())), name
    one, other = load_file(verl.adapters(folder / "one")), load_file(plain.adapters(folder / "other"))
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert float((one[name] - value).abs().max()) <= 1e-4, name


def test_each_policy_is_trained_as_by_the_torch_engine(open_policies: Open, tmp_path: Path) -> None:
    settings = {"tokens_per_microbatch": 64, "critic_trunk": "shared", "gradient_checkpointing": True}
    engine = open_policies(verl_engine, critic=True, **{"verl.world_size": ALONE}, **settings)
    compare(engine, open_policies(torch_engine, critic=True, **settings), tmp_path)
