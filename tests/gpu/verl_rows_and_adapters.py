"""verl's worker on a GPU: the memory that a row of 64k tokens takes, and its logprobs beside the torch engine's; and adapters
alone in a real vLLM, beside whole weights.

    python -m tests.gpu.verl_rows_and_adapters FIGURES.json [--device cpu]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lightning.batch import Sample
    from lightning.engines.protocol import Engine

WORDS = 151_936
TABLE = 12
"""Bytes for each token and word that verl's own passes keep: logits and their gradient in float32, and the entropy's
probabilities."""
ROUGH = {"cuda": 0.05, "cpu": 1e-3}
"""Mean gap in nats between two computations of the same weights: bfloat16 on a GPU, float32 on a CPU."""


def row(length: int, words: int) -> Sample:
    """A row whose second half is trained."""
    from lightning.batch import Sample, TokenSpan

    dice, trained = np.random.default_rng(length), np.arange(length) >= length // 2
    weights = np.where(trained, 1.0 / trained.sum(), 0.0).astype(np.float32)
    advantages = np.where(trained, dice.normal(size=length), 0.0).astype(np.float32)
    ids, versions = dice.integers(8, words, length).astype(np.int32), np.where(trained, 0, -1).astype(np.int32)
    spans = (TokenSpan("r", 1, 0, length // 2, length),)
    return Sample(ids, weights, advantages, np.where(trained, -6.0, np.nan).astype(np.float32), versions, spans)


def opened(folder: Path, device: str, lr: float, **settings: object) -> Engine:
    """A verl engine in this process."""
    from lightning.config import Config, with_settings
    from lightning.engines.protocol import OptimizerConfig
    from lightning_verl.plugin import verl_engine

    names = {f"engine.{name}": value for name, value in settings.items()}
    engine = verl_engine(with_settings(Config(), {"engine.device": device, "engine.verl.world_size": 0, **names}))
    engine.open(folder, OptimizerConfig(lr=lr), seed=0)
    return engine


def apart(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Nats between two answers, in the mean."""
    return float(np.mean(np.abs(one - other)))


def long_row(folder: Path, device: str) -> dict[str, object]:
    """Steps on a row of 64k tokens, by a model of four layers with Qwen3's vocabulary; on a CPU on a shorter row."""
    import torch
    from lightning.engines.protocol import OptimizerConfig
    from lightning.engines.torch.engine import TorchEngine
    from lightning.losses.correction import NO_CORRECTION
    from lightning.losses.policy_gradient import ClippedPolicyGradient
    from transformers import AutoModelForCausalLM, Qwen3Config

    gpu = device == "cuda"
    words, length, width = (WORDS, 65_536, 1024) if gpu else (320, 512, 64)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": width // 8}
    sizes = {"vocab_size": words, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4}
    made = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads, max_position_embeddings=length))
    made.save_pretrained(folder)
    del made
    sample, loss = row(length, words), ClippedPolicyGradient(entropy_coefficient=0.01, correction=NO_CORRECTION)
    engine = opened(folder, device, 1e-6, gradient_checkpointing=True, tokens_per_microbatch=length)
    found: dict[str, object] = {"tokens": length, "table_bytes": TABLE * words * length}
    try:
        ours = engine.logprobs([sample])[0][1:]
        before = torch.cuda.memory_allocated() if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        took = []
        for _ in range(2):
            began = time.perf_counter()
            metrics = engine.step([sample], loss).metrics
            took.append(time.perf_counter() - began)
            assert metrics["stepped"] == 1.0, metrics
        found |= {"seconds": min(took), "grad_norm": metrics["grad_norm"]}
        if gpu:
            peak = torch.cuda.max_memory_allocated() - before
            found["peak_bytes"] = peak
            assert peak < TABLE * words * length / 3, found
    finally:
        engine.close()
    beside = TorchEngine(device=device, step="linear")
    beside.open(folder, OptimizerConfig(lr=1e-6), seed=0)
    try:
        found["gap"] = apart(ours, beside.logprobs([sample])[0][1:])
    finally:
        beside.close()
    assert float(str(found["gap"])) <= ROUGH[device], found
    return found


async def adapters(folder: Path, device: str) -> dict[str, object]:
    """Adapters of a trained model in vLLM, and then its whole weights: the logprobs are the trainer's after both."""
    from lightning.config import LoraConfig
    from lightning.config.sections import PolicyServerConfig
    from lightning.engines.protocol import WritesAdapters
    from lightning.losses.correction import NO_CORRECTION
    from lightning.losses.policy_gradient import ClippedPolicyGradient
    from lightning.policy_server.auto_settings import Demand
    from lightning.policy_server.vllm_server import OwnedVLLM
    from lightning.testing.tiny_models import make_tiny_model

    model = make_tiny_model(folder / "tiny", vocab=320)
    engine = opened(model, device, 2e-2, lora=LoraConfig(rank=8).model_dump())
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = PolicyServerConfig.model_validate({"device": device, "dtype": dtype, "gpu_memory_utilization": 0.3})
    server = OwnedVLLM(model, config, log=folder / "vllm.log", demand=Demand())
    sample = row(96, 320)
    found: dict[str, object] = {}
    try:
        await server.start()

        async def served() -> np.ndarray[Any, Any]:
            return np.asarray(await server._running().served_logprobs(server.model, sample.ids.tolist()))

        first = await served()
        for _ in range(3):
            engine.step([sample], ClippedPolicyGradient(correction=NO_CORRECTION))
        ours = engine.logprobs([sample])[0][1:]
        found["moved"] = apart(first, ours)
        assert isinstance(engine, WritesAdapters)
        for version, write in ((1, engine.adapters), (2, engine.weights)):
            began = time.perf_counter()
            file = write(folder / f"version-{version}.safetensors")
            assert file is not None, "the adapters alone cannot be written"
            wrote, began = time.perf_counter() - began, time.perf_counter()
            await server.update(file, version)
            took = time.perf_counter() - began
            gap = apart(await served(), ours)
            name = write.__name__
            found[name] = {"bytes": file.stat().st_size, "write_seconds": wrote, "update_seconds": took, "gap": gap}
            assert gap <= ROUGH[device], found
            assert gap < 0.2 * float(str(found["moved"])), found
    finally:
        await server.close()
        engine.close()
    return found


def measure(folder: Path, device: str) -> dict[str, object]:
    """The figures. Raises `AssertionError` where something is not as it should be."""
    return {"long_row": long_row(folder / "long", device), "adapters": asyncio.run(adapters(folder, device))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        given.figures.write_text(json.dumps(measure(Path(name), given.device), indent=1))
