"""A real vLLM on a GPU gives its memory back and takes it again: how much, how fast, and whether it answers as before.

python -m tests.gpu.sleep_and_wake FIGURES.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path

ROUNDS = 3
SAME = 0.05
"""Nats between two answers of the same weights in bfloat16."""
OTHER = 0.2
"""Nats somewhere between those of two seeds."""
IDS = [(7 * index + 3) % 320 for index in range(64)]


def used() -> float:
    """GiB of the first GPU's memory that are taken, by whomever."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


async def measure(folder: Path) -> dict[str, object]:
    """The figures. Raises `AssertionError` where it does not do what it should."""
    from lightning.config.sections import PolicyServerConfig
    from lightning.policy_server.auto_settings import Demand
    from lightning.policy_server.vllm_server import OwnedVLLM
    from lightning.testing.tiny_models import make_tiny_model

    first, second = make_tiny_model(folder / "first", seed=0), make_tiny_model(folder / "second", seed=1)
    config = PolicyServerConfig(device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5)
    server = OwnedVLLM(first, config, log=folder / "vllm.log", demand=Demand(shares_gpu=True))
    found: dict[str, object] = {"before": used()}
    began = time.monotonic()
    await server.start()
    try:
        found["start_seconds"] = time.monotonic() - began

        async def logprobs() -> list[float]:
            return await server._running().served_logprobs(server.model, IDS)

        def gap(ours: list[float], theirs: list[float]) -> float:
            return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

        expected = await logprobs()
        rounds = []
        for _ in range(ROUNDS):
            awake = used()
            began = time.monotonic()
            await server.sleep()
            slept, asleep, began = time.monotonic() - began, used(), time.monotonic()
            await server.wake()
            woke = time.monotonic() - began
            again = gap(expected, await logprobs())
            rounds.append(
                {"awake": awake, "asleep": asleep, "sleep_seconds": slept, "wake_seconds": woke, "gap": again}
            )
            assert again <= SAME, rounds
            assert awake - asleep > 0.5 * (awake - float(str(found["before"]))), rounds
        found["rounds"] = rounds
        await server.sleep()
        await server.wake()
        await server.update(second / "model.safetensors", 1)
        found["new_weights_differ_by"] = gap(expected, await logprobs())
        assert float(str(found["new_weights_differ_by"])) > OTHER, found
        await server.update(first / "model.safetensors", 2)
        found["old_weights_again_differ_by"] = gap(expected, await logprobs())
        assert float(str(found["old_weights_again_differ_by"])) <= SAME, found
    finally:
        await server.close()
    found["after"] = used()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        given.figures.write_text(json.dumps(asyncio.run(measure(Path(name))), indent=1))
