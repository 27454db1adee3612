"""Two workers without a Ray: rows that they share, each with a part of every row's tokens (Ulysses, arXiv 2309.14509), and
adapters that they hand over alone, of one policy and of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lightning.config import LoraConfig
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning_credits.value_head import CriticHead
from lightning_verl.plugin import verl_engine
from safetensors.torch import load_file

from tests.plugins.verl.conftest import ALONE, CALLS, LOSS, POLICIES, UNCLIPPED, OpenPolicies, OpenVerl
from tests.plugins.verl.test_engine import alone_are_the_whole, compare, rows, valued
from tests.plugins.verl.test_policies import compare_policies, mixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # verl's own


@pytest.mark.usefixtures("two_processes")
def test_rows_longer_than_a_micro_batch_are_shared(open_verl: OpenVerl, model: Path, tmp_path: Path) -> None:
    """Logprobs, values, gradients and weights are those of whole rows on one device. The attention is a stand-in for that of
    flash-attn (`rank_process.py`); what verl does around it is verl's own. Rows have up to 39 tokens, and a worker's part of a
    micro-batch 8 or half of a row."""
    engine = open_verl(
        2,
        optimizer=UNCLIPPED,
        critic=True,
        tokens_per_microbatch=8,
        **{
            "verl.sharding": {"ulysses_sequence_parallel_size": 2},
            "verl.model": {"override_config": {"attn_implementation": "flash_attention_2"}},
        },
    )
    assert [place for place, _ in engine._job.ranks] == [0, 0]  # type: ignore[attr-defined]
    other = TorchEngine(device="cpu")
    other.open(model, UNCLIPPED, seed=0, head=CriticHead("frozen"))
    try:
        compare(engine, other, tmp_path)
    finally:
        other.close()


@pytest.mark.usefixtures("two_processes")
def test_adapters_of_two_workers_are_handed_over_alone(open_verl: OpenVerl, tmp_path: Path) -> None:
    """Each has a part of every adapter."""
    engine = open_verl(2, optimizer=OptimizerConfig(lr=1e-2), lora=LoraConfig(rank=4, alpha=8))
    engine.step(rows(0), LOSS)
    alone_are_the_whole(engine, tmp_path)


@pytest.mark.usefixtures("two_processes")
def test_two_workers_train_the_adapters_of_several_policies_and_one_goes_on(
    open_policies: OpenPolicies, tmp_path: Path
) -> None:
    """Each policy's gradient is clipped by its own norm, over both workers."""
    clipped = replace(UNCLIPPED, max_grad_norm=0.01)
    engine = open_policies(verl_engine, critic=True, optimizer=clipped, **{"verl.world_size": 2})
    compare_policies(engine, open_policies(torch_engine, critic=True, optimizer=clipped), tmp_path)
    engine.save(tmp_path / "state")
    batch = valued(mixed(7))
    expected = engine.step(batch, CALLS)
    assert min(expected.metrics[f"policy/{name}/grad_norm"] for name in POLICIES) > 2 * clipped.max_grad_norm
    weights = load_file(engine.adapters(tmp_path / "expected"))
    engine.close()
    other = open_policies(verl_engine, critic=True, optimizer=clipped, **{"verl.world_size": ALONE})
    other.load(tmp_path / "state")
    found = other.step(batch, CALLS).metrics
    for name in {*expected.metrics} - {"microbatches", "tokens_forward", "tree"}:
        assert found[name] == pytest.approx(expected.metrics[name], rel=2e-4, abs=1e-5), name
    for name, value in load_file(other.adapters(tmp_path / "found")).items():
        assert float((weights[name] - value).abs().max()) <= 1e-5, name
