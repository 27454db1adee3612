"""Two vLLMs on one GPU serve one policy in a training: calls of each, tokens that are not as sampled, and the weights of both
before and after the updates.

    python -m tests.gpu.two_replicas FIGURES.json [--device cpu]

Lightning gives each vLLM that it starts GPUs of its own. So both are started here, the second when the first is up, because a
vLLM measures at its start how much of the GPU is free; the training attaches to them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.gpu.verl_rows_and_adapters import ROUGH, apart

if TYPE_CHECKING:
    from lightning.policy_server.vllm_server import OwnedVLLM
    from lightning.trainer.summary import Summary
    from lightning.types import LLM, StepRecord, Task

SHARE = 0.4
"""Fraction of the GPU's memory for each vLLM; with two of them the trainer keeps a fifth."""
STEPS = 3
LARGEST = 20
"""How many times as large as the mean gap between two computations the largest one of all tokens may be."""
IDS = [(7 * index + 3) % 320 for index in range(64)]
"""A text on whose tokens the weights of both vLLMs are compared."""


def answer(task: Task, llm: LLM) -> float:
    """An agent of two calls, whose reward follows the second answer."""
    import httpx

    said = [{"role": "user", "content": str(task.input)}]
    for _ in range(2):
        body = {"model": llm.model, "messages": said, "max_tokens": 24}
        headers = {"authorization": f"Bearer {llm.api_key}"}
        answered = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=120)
        text = str(answered.raise_for_status().json()["choices"][0]["message"]["content"])
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    return float(sum(map(ord, text)) % 3)


@contextlib.contextmanager
def started(model: Path, device: str, folder: Path) -> Iterator[list[OwnedVLLM]]:
    """Two vLLMs that share a GPU, or a CPU."""
    from lightning.config.sections import PolicyServerConfig
    from lightning.policy_server.auto_settings import Demand
    from lightning.policy_server.owner_secret import SECRET
    from lightning.policy_server.vllm_server import OwnedVLLM

    os.environ[SECRET] = secrets.token_hex(32)  # of the trainer and of both vLLMs
    given = {"device": device, "dtype": dtype_of(device), "gpu_memory_utilization": SHARE, "max_model_len": 512}
    given |= {"args": ("--enforce-eager",)} if device == "cuda" else {}  # starts without a minute of compiling
    config = PolicyServerConfig.model_validate(given)
    servers = [OwnedVLLM(model, config, log=folder / f"{name}.log", demand=Demand(servers=2)) for name in ("a", "b")]
    try:
        for server in servers:
            asyncio.run(server.start())
        yield servers
    finally:
        for server in servers:
            asyncio.run(server.close())


def dtype_of(device: str) -> str:
    """The dtype of trainer and vLLMs."""
    return "bfloat16" if device == "cuda" else "float32"


def train(model: Path, device: str, servers: list[OwnedVLLM], out: Path) -> Summary:
    """Train the policy that both serve."""
    from lightning.config import config_model, with_settings
    from lightning.trainer import Trainer

    settings = {
        "engine.device": device,
        "engine.dtype": dtype_of(device),
        "engine.lr": 1e-2,
        "policy_server.attach": tuple(server.url for server in servers),
        "runner.concurrency": 8,
    }
    config = with_settings(config_model()(), settings)
    trainer = Trainer(
        model,
        "grpo:group_size=4",
        runner="inline",
        config=config,
        steps=STEPS,
        tasks_per_step=4,
        out=out,
        progress=False,
    )
    return trainer.fit(answer, ["one", "two", "three", "four"])


def weights(server: OwnedVLLM) -> np.ndarray[Any, Any]:
    """Logprobs by which a vLLM's weights are told from others."""
    return np.asarray(asyncio.run(server._running().served_logprobs(server.model, IDS)))


async def records(out: Path) -> list[StepRecord]:
    """The steps of the run."""
    from lightning.cli.output import with_store
    from lightning.store.places import store_in

    return list(await with_store(store_in(out), lambda store: store.steps(out.name)))


def measure(folder: Path, device: str) -> dict[str, object]:
    """The figures. Raises `AssertionError` where it is not one policy on two servers."""
    from lightning.testing.tiny_models import make_tiny_model

    model, began = make_tiny_model(folder / "tiny"), time.monotonic()
    with started(model, device, folder) as servers:
        found: dict[str, object] = {"share_of_each": SHARE, "start_seconds": time.monotonic() - began}
        before, began = [weights(server) for server in servers], time.monotonic()
        summary = train(model, device, servers, folder / "run")
        found["train_seconds"] = time.monotonic() - began
        after = [weights(server) for server in servers]
    steps = asyncio.run(records(folder / "run"))
    numbers = range(len(servers))
    calls = [sum(step.metrics.get(f"server_{number}/requests", 0.0) for step in steps) for number in numbers]
    versions = [steps[-1].metrics.get(f"server_{number}/version") for number in numbers]
    found |= {"steps": len(steps), "calls": calls, "versions": versions, "failed": summary.failed}
    found |= {"trained_tokens": summary.trained_tokens, "wrong_tokens": summary.drift_tokens}
    moved = [apart(old, new) for old, new in zip(before, after, strict=True)]
    found |= {"apart_before": apart(*before), "apart_after": apart(*after), "moved": moved}
    found["largest_gap_to_the_trainer"] = summary.max_logprob_gap
    assert len(steps) == STEPS, found
    assert min(calls) > 0, found
    assert summary.trained_tokens > 0 == summary.drift_tokens, found
    assert versions == [STEPS - 1.0] * len(servers), found  # of the weights that sampled the last step
    assert apart(*after) <= ROUGH[device] < min(moved), found
    assert summary.max_logprob_gap is not None, found
    assert summary.max_logprob_gap <= LARGEST * ROUGH[device], found
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        given.figures.write_text(json.dumps(measure(Path(name), given.device), indent=1))
