"""Adapters of several policies on one base in verl's workers: the numbers are those of the torch engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample
from lightning.config import Config, LoraConfig, with_settings
from lightning.engines.plugin import torch_engine
from lightning.losses.protocol import Loss
from lightning_policies.engine import PolicyEngine, TrainedPolicy, seed_of
from lightning_verl.engine import VerlEngine
from lightning_verl.plugin import verl_engine
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.plugins.verl.conftest import ALONE, CALLS, LOSS, POLICIES, UNCLIPPED, OpenPolicies
from tests.plugins.verl.test_engine import assert_equal, gradient, rows, valued

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # verl's own


def mixed(seed: int, **how: Any) -> list[Sample]:
    """Rows of both policies, in turn."""
    return [replace(row, policy=("writer", "editor")[place % 2]) for place, row in enumerate(rows(seed, **how))]


def compare_policies(verl: PolicyEngine, plain: PolicyEngine, folder: Path) -> None:
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
            for name in POLICIES:
                engine = verl._engines[name]
                assert isinstance(engine, VerlEngine)
                assert engine.saved is not None
                assert engine.saved[0] == (folder / "verl" / name).resolve(), "workers that die are revived from it"
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


def test_each_policy_is_trained_as_by_the_torch_engine(open_policies: OpenPolicies, tmp_path: Path) -> None:
    settings = {"tokens_per_microbatch": 64, "critic_trunk": "shared", "gradient_checkpointing": True}
    engine = open_policies(verl_engine, critic=True, **{"verl.world_size": ALONE}, **settings)
    compare_policies(engine, open_policies(torch_engine, critic=True, **settings), tmp_path)


def test_a_policy_is_bit_for_bit_the_one_that_is_trained_by_itself(
    open_policies: OpenPolicies, model: Path, tmp_path: Path
) -> None:
    """Also when its gradient is added up while another one's waits. A policy's state has its own adapters alone."""
    engine = open_policies(verl_engine, **{"verl.world_size": ALONE})
    first = mixed(0)
    engine.step(first, LOSS)
    batch = mixed(1)
    for part in (batch[:3], batch[3:]):
        engine.forward_backward(part, LOSS)
    assert engine.optim_step(3e-3).metrics["updates"] == 2
    engine.save(tmp_path / "state")
    together = load_file(engine.adapters(tmp_path / "together"))
    sizes = {name: sum(value.numel() for value in gradient(tmp_path / "state" / name).values()) for name in POLICIES}
    assert sum(sizes.values()) == sum(value.numel() for value in together.values())
    loaded = AutoModelForCausalLM.from_pretrained(engine.export(tmp_path / "model") / "writer", dtype=torch.float32)
    row = next(row for row in batch if row.policy == "writer")
    ids = torch.from_numpy(row.ids.astype(np.int64))
    with torch.no_grad():
        said = loaded(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(engine.logprobs([row])[0][1:], said.numpy(), atol=1e-4)
    engine.close()
    for name, policy in POLICIES.items():
        assert policy.lora is not None
        config = with_settings(
            Config(),
            {"engine.device": "cpu", "engine.verl.world_size": ALONE, "engine.lora": policy.lora.model_dump()},
        )
        alone, rate = verl_engine(config), policy.lr or UNCLIPPED.lr
        alone.open(model, replace(UNCLIPPED, lr=rate), seed=seed_of(0, name))
        try:
            alone.step([row for row in first if row.policy == name], LOSS)
            for part in (batch[:3], batch[3:]):
                alone.forward_backward([row for row in part if row.policy == name], LOSS)
            alone.optim_step(3e-3 * rate / UNCLIPPED.lr)
            assert isinstance(alone, VerlEngine)
            file = alone.adapters(tmp_path / name)
            assert file is not None
            for key, value in load_file(file).items():
                assert torch.equal(value, together[f"{name}|{key}"]), key
        finally:
            alone.close()


@pytest.mark.parametrize("order", [("editor", "writer"), ("writer", "editor")])
def test_policies_that_adapt_other_layers_are_trained_in_bfloat16(model: Path, order: tuple[str, str]) -> None:
    """Also the layers that the first policy has no adapters in."""
    targets = dict(zip(order, ("0.self_attn.q_proj", "1.self_attn.v_proj"), strict=True))
    policies = {
        name: TrainedPolicy(LoraConfig(rank=2, alpha=4, target_modules=(where,))) for name, where in targets.items()
    }
    config = with_settings(
        Config(), {"engine.device": "cpu", "engine.dtype": "bfloat16", "engine.verl.world_size": ALONE}
    )
    engine = PolicyEngine(policies, verl_engine, config)
    try:
        engine.open(model, UNCLIPPED, seed=0)
        for step in range(2):
            found = engine.step(mixed(step), LOSS)
            assert all(found.metrics[f"policy/{name}/grad_norm"] > 0 for name in order)
    finally:
        engine.close()
