"""Two workers without a Ray: rows that they share, each with a part of every row's tokens (Ulysses, arXiv 2309.14509), and
adapters that they hand over alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.config import LoraConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning_credits.value_head import CriticHead

from tests.plugins.verl.conftest import LOSS, OpenVerl
from tests.plugins.verl.test_engine import UNCLIPPED, alone_are_the_whole, compare, rows

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
