"""The torch engine on a GPU: its gradients beside those of a CPU in float64, and the tree step by compiled FlexAttention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.config import LoraConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.testing.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.core.engines.test_tree import LOSS, assert_same, gradient, group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler looks at it
]
EXACT = 2e-3
"""Of float32 beside float64, relative to the gradient's norm."""
ROUGH = 0.1
"""Of bfloat16 beside bfloat16 in another order of sums."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab=320)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 128 and grouped queries, as the models people train have them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
    )
    folder = tmp_path_factory.mktemp("models") / "wide"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def open_engine(model: Path) -> Iterator[Any]:
    opened: list[TorchEngine] = []

    def make(folder: Path = model, **arguments: Any) -> TorchEngine:
        engine = TorchEngine(**arguments)
        engine.open(folder, OptimizerConfig(lr=1e-3), seed=0)
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("size", ["tiny", "wide"])
@pytest.mark.parametrize("budget", [10_000, 64])
def test_float32_on_a_gpu_has_the_gradient_of_float64_on_a_cpu(
    open_engine: Any, model: Path, wide: Path, size: str, budget: int
) -> None:
    """`budget`: everything in one pack, and packs behind a path."""
    folder = {"tiny": model, "wide": wide}[size]
    want = gradient(open_engine(folder, device="cpu", dtype="float64"), group(), "per-call")
    engine = open_engine(folder, device="cuda", dtype="float32")
    for kind in ("per-call", "linear", "tree"):
        assert_same(want, gradient(engine, group(), kind, budget), EXACT)
    assert engine._no_tree == "", engine._no_tree


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_a_bfloat16_tree_is_the_bfloat16_rows(open_engine: Any, wide: Path, lora: LoraConfig | None) -> None:
    engine = open_engine(wide, device="cuda", dtype="bfloat16", lora=lora)
    rows = gradient(engine, group(16), "linear")
    tree = gradient(engine, group(16), "tree")
    assert engine._no_tree == "", engine._no_tree
    assert_same(rows, tree, ROUGH)


def test_auto_chooses_a_gpu_bfloat16_and_the_tree(open_engine: Any, wide: Path) -> None:
    engine = open_engine(wide)
    assert {parameter.device.type for parameter in engine._parameters.values()} == {"cuda"}
    result = engine.step(group(16), LOSS)
    assert result.metrics["tree"] == 1.0, engine._no_tree
    assert engine._opened().dtype == torch.bfloat16


def test_float64_on_a_gpu(open_engine: Any) -> None:
    """FlexAttention has no float64."""
    want = gradient(open_engine(device="cpu", dtype="float64"), group(), "per-call")
    engine = open_engine(device="cuda", dtype="float64")
    assert_same(want, gradient(engine, group(), "linear"), 1e-6)
    assert_same(want, gradient(engine, group(), "tree"), 1e-6)


@pytest.mark.parametrize("weights", [None, "bfloat16"], ids=["float32", "bfloat16"])
def test_state_saved_on_a_gpu_goes_on_there(open_engine: Any, model: Path, tmp_path: Path, weights: str | None) -> None:
    one = open_engine(device="cuda", dtype=weights or "float32")
    one.step(group(8), LOSS)
    one.save(tmp_path / "state")
    other = open_engine(device="cuda", dtype=weights or "float32")
    other.load(tmp_path / "state")
    first, second = one.step(group(8), LOSS).metrics, other.step(group(8), LOSS).metrics
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-2)


def test_memory_that_runs_out_halves_the_micro_batch(open_engine: Any, wide: Path) -> None:
    """A real shortage: nearly all of the device is taken."""
    engine = open_engine(wide, device="cuda", dtype="float32", step="linear", tokens_per_microbatch=1 << 20)
    engine.step(group(4), LOSS)  # the optimizer's state
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((whole - free + 400 * 2**20) / whole)
    try:
        found = engine.step(group(512, turns=4), LOSS).metrics
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found["grad_norm"] > 0
    assert engine._budget < 1 << 20
