"""verl's Megatron engine beside the torch engine: the same rows and numbers, in this process and cut over two."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample, TokenSpan
from lightning.config import RunnerConfig
from lightning.engines.protocol import Engine, OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import EngineError
from lightning.losses.protocol import LossOutput, TokenBatch
from lightning.testing.tiny_models import make_tiny_model
from lightning_ray.cluster import connect
from safetensors.torch import load_file

from tests.plugins.verl.conftest import ALONE, CALLS, LOSS, VOCAB, OpenVerl, masked

pytest.importorskip("megatron.core", reason="Megatron is not installed")
pytest.importorskip("mbridge", reason="mbridge is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # verl's and Ray's own
CLIPPED = OptimizerConfig(lr=1e-3, max_grad_norm=0.05, weight_decay=0.5, eps=1e-6)
"""`eps` is above the rounding of a gradient: Adam's first steps would make whole steps of that."""
FIRST_WORD = 3
"""The first id that is no special token."""
STRATEGY = "verl.strategy"


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose output layer is its embedding."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", tied=True, architecture="qwen2")


def rows(seed: int, count: int = 7) -> list[Sample]:
    """Rows of different lengths with weights in their later half; without the padding token, whose embedding transformers
    does not train and Megatron does."""
    dice = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(dice.integers(12, 40))
        weights = np.where(np.arange(length) >= length // 2, 0.02, 0.0).astype(np.float32)
        trained = weights > 0
        made.append(
            Sample(
                dice.integers(FIRST_WORD, VOCAB, length).astype(np.int32),
                weights,
                np.where(trained, dice.normal(), 0).astype(np.float32),
                np.where(trained, dice.uniform(-7, -4, length), np.nan).astype(np.float32),
                np.where(trained, 0, -1).astype(np.int32),
                (TokenSpan(f"r{seed}-{number}", 1, 0, length // 2, length),),
                0.7 if seed == 2 else 1.0,
            )
        )
    return made


def trained_by_torch(model: Path) -> TorchEngine:
    engine = TorchEngine(device="cpu", step="linear")  # rows, as Megatron's
    engine.open(model, CLIPPED, seed=0)
    return engine


def same_steps(engine: Engine, expected: Engine, seeds: range) -> None:
    """Logprobs, metrics and norms over steps with different losses; every second row has sampling masks."""
    for seed in seeds:
        batch, loss = masked(rows(seed)), CALLS if seed == 1 else LOSS
        for mine, theirs in zip(engine.logprobs(batch), expected.logprobs(batch), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        found, wanted = engine.step(batch, loss), expected.step(batch, loss)
        assert found.seen == wanted.seen
        for name in {*wanted.metrics} - {"microbatches", "tokens_forward", "tree"}:
            assert found.metrics[name] == pytest.approx(wanted.metrics[name], rel=2e-4, abs=1e-5), name


def same_weights(engine: Engine, expected: Engine, folder: Path) -> None:
    one, other = load_file(engine.weights(folder / "one")), load_file(expected.weights(folder / "other"))
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert float((one[name] - value).abs().max()) <= 1e-4, name


def test_it_computes_what_the_torch_engine_computes(
    open_verl: OpenVerl, model: Path, tied: Path, tmp_path: Path
) -> None:
    """Loss, gradient norm, clipping, weight decay, reference and files; saved and resumed; and one model after another."""
    for folder in (tied, model):
        engine = open_verl(
            ALONE,
            folder=folder,
            optimizer=CLIPPED,
            tokens_per_microbatch=64,
            gradient_checkpointing=True,
            **{STRATEGY: "megatron"},
        )
        expected = trained_by_torch(folder)
        same_steps(engine, expected, range(3))
        same_weights(engine, expected, tmp_path)
        engine.save(tmp_path / "state")
        engine.step(rows(8), LOSS)
        engine.load(tmp_path / "state")
        same_steps(engine, expected, range(3, 5))
        engine.close()
        expected.close()
    assert not [file for file in (tmp_path / "state").iterdir() if file.suffix not in (".safetensors", ".json")]
    fresh = open_verl(ALONE, optimizer=CLIPPED, **{STRATEGY: "megatron", "dtype": "bfloat16"})
    found = np.concatenate([row[1:] for row in fresh.logprobs(rows(0))])
    rounded = torch.from_numpy(found).bfloat16().float().numpy()
    assert (found != rounded).mean() > 0.9, "the softmax is float32, whatever the model computes in"


def test_what_is_wrong_changes_nothing(open_verl: OpenVerl, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loss that is not finite, and a gradient that is not; and a state of another strategy."""
    engine, batch = open_verl(ALONE, **{STRATEGY: "megatron"}), rows(0)
    before = engine.logprobs(batch)

    def infinite(batch: TokenBatch) -> LossOutput:
        return LossOutput((batch.logprobs * torch.inf).sum())

    def infinite_gradient(batch: TokenBatch) -> LossOutput:
        return LossOutput((batch.logprobs - batch.logprobs.detach()).sqrt().sum())

    for loss, said in (
        (infinite, r"the loss is -inf at step 1 in .* rows"),
        (infinite_gradient, "the gradient is not finite"),
    ):
        assert engine.step(batch, loss).metrics["skipped_nonfinite"] == 1.0
        assert re.search(said, caplog.text)
    for mine, first in zip(engine.logprobs(batch), before, strict=True):
        np.testing.assert_array_equal(mine, first)
    engine.save(tmp_path / "state")
    engine.close()
    with pytest.raises(EngineError, match=r"in other parts.* set engine\.verl\.strategy = megatron"):
        open_verl(ALONE).load(tmp_path / "state")


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("cut", ["tensor_model_parallel_size", "pipeline_model_parallel_size", ""])
def test_two_workers_compute_it_however_the_model_is_cut(
    open_verl: OpenVerl, model: Path, tmp_path: Path, cut: str
) -> None:
    """By tensors, by layers, or not at all, each with a whole copy and its own rows; and they are resumed by two others."""
    settings = {STRATEGY: "megatron", "verl.megatron": {cut: 2} if cut else {}, "tokens_per_microbatch": 64}
    engine, expected = open_verl(2, optimizer=CLIPPED, **settings), trained_by_torch(model)
    same_steps(engine, expected, range(3))
    same_weights(engine, expected, tmp_path)
    engine.save(tmp_path / "state")
    engine.close()
    resumed = open_verl(2, optimizer=CLIPPED, seed=7, **settings)
    resumed.load(tmp_path / "state")
    same_steps(resumed, expected, range(3, 5))
    expected.close()


def test_ray_starts_after_it(open_verl: OpenVerl) -> None:
    """And after those above: what torch keeps of a destroyed process group for a thread hangs or crashes what another thread
    forks."""
    engine = open_verl(ALONE, **{STRATEGY: "megatron"})
    engine.step(rows(0), LOSS)
    engine.close()
    cluster = asyncio.run(connect(RunnerConfig(concurrency=1)))
    assert cluster.thread is not None
    asyncio.run(cluster.close())
