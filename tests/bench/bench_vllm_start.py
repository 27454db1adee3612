"""How long an owned vLLM on a CPU takes to start: its engine forked from the server, and spawned, as vLLM does it by itself.

Both in turns, each time until a first answer; CPU is that of the server and its engine, from start to end.

    python tests/bench/bench_vllm_start.py [--model FOLDER] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import httpx
from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.launch import COPIED
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.testing.tiny_models import make_tiny_model

KINDS = {"forked": "", "spawned": "spawn"}
"""By the value of vLLM's own variable for it."""


async def start(model: Path, log: Path) -> float:
    """Wall seconds until a first answer."""
    server = OwnedVLLM(model, PolicyServerConfig(device="cpu", max_model_len=256), log=log)
    began = time.perf_counter()
    await server.start()
    async with httpx.AsyncClient(timeout=120) as client:
        asked = {"model": server.model, "prompt": "1 2 3", "max_tokens": 4}
        (await client.post(f"{server.url}/v1/completions", json=asked)).raise_for_status()
    took = time.perf_counter() - began
    await server.close()
    return took


def measure(kind: str, model: Path, folder: Path) -> tuple[float, float]:
    """Wall seconds until a first answer, and CPU seconds in all, of one start. Raises where it was not of this kind."""
    log = folder / "vllm.log"
    log.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with patch.dict("os.environ", {"VLLM_WORKER_MULTIPROC_METHOD": KINDS[kind]}):
        wall = asyncio.run(start(model, log))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if (COPIED in log.read_text()) != (kind == "forked"):
        raise SystemExit(f"the engine was not {kind}: see {log}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print both kinds side by side, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; by default a tiny model is made")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = asked.model or make_tiny_model(folder / "model", seed=0)
        measured = [{kind: measure(kind, model, folder) for kind in KINDS} for _ in range(asked.rounds)]
    medians = {kind: [statistics.median(each[kind][part] for each in measured) for part in (0, 1)] for kind in KINDS}
    for kind, (wall, cpu) in medians.items():
        sys.stdout.write(f"{kind:8} {wall:6.1f} s until a first answer, {cpu:6.1f} CPU-seconds\n")
    ratios = [forked / spawned for forked, spawned in zip(*medians.values(), strict=True)]
    sys.stdout.write(f"forked takes {ratios[0]:.2f} of the time and {ratios[1]:.2f} of the CPU time\n")


if __name__ == "__main__":
    main()
