"""`kill -9` of a worker of the verl engine while it computes a step, then of the trainer, which goes on with two workers and
smaller micro-batches: nothing is trained twice. All calls are sampled with top-p, so every trained token has a mask."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.batch import mask_of
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Rollout, Transition
from lightning_examples.raw_python import MODEL
from lightning_examples.word_problems import tasks, val_tasks
from lightning_proof.recorded_step import rollouts_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LR, WARMUP = 2e-3, 10
ALGORITHM = "reinforce++"
"""Compares with the whole batch, so that every step has something to train on, however few its tasks are."""
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They see within a minute that their cluster has ended."""


@pytest.fixture
def train_run(demo_run: Any, tmp_path: Path) -> Any:
    """`lightning train` with the demonstration's agent and model, by one worker on a Ray of its own, sampled with top-p."""
    for name, some in (("tasks", tasks(12, 0)), ("val", val_tasks(4))):
        lines = [json.dumps({"input": task.input, "expected": task.expected}) for task in some]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    demo_run.command = (
        "train", "lightning_examples.raw_python.agent:agent", "--model", str(MODEL), "--engine", "verl",
        "--algorithm", ALGORITHM, "--tasks", str(tmp_path / "tasks.jsonl"), "--val", str(tmp_path / "val.jsonl"),
        "--set", "policy_server.max_model_len=1024", "--set", f"engine.lr={LR}", "--set", f"engine.warmup_steps={WARMUP}",
        "--set", "gateway.override_sampling={top_p=0.9}",
    )  # fmt: skip
    return demo_run


def computing(run: Any, step: int) -> psutil.Process:
    """The engine's worker, at a moment when it computes the gradient of a step."""
    run.until(lambda run: len(run.committed()) == step)
    [worker] = run.descendants("PolicyWorker")
    deadline = time.monotonic() + 200
    while not worker.cmdline()[0].endswith("PolicyWorker.accumulate"):  # Ray says in the title what a worker does
        assert time.monotonic() < deadline, run.output
        time.sleep(0.005)
    return worker


def test_killing_a_worker_in_a_step_then_the_trainer_in_the_next(train_run: Any) -> None:
    train_run.start()
    computing(train_run, 1).kill()
    computing(train_run, 2)
    assert "starting the workers again after step 1" in train_run.output
    children, sampled = train_run.descendants(""), by_id(train_run)
    train_run.process.send_signal(signal.SIGKILL)
    train_run.wait()
    _, alive = psutil.wait_procs([child for child in children if not is_rays_own(child)], timeout=120)
    for process in children:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive, "a killed trainer leaves no worker, no cluster, no vLLM and no agent behind"

    train_run.start("--resume", "--set", "engine.verl.world_size=2", "--set", "engine.tokens_per_microbatch=1024")
    assert train_run.wait() == 0, train_run.output
    assert "config epoch 1 begins with step" in train_run.output
    train_run.assert_whole()
    after = by_id(train_run)
    assert all(after[name].attempt == rollout.attempt for name, rollout in sampled.items()), "none was run again"
    steps = train_run.committed()
    assert len({record.digest for record in steps}) == len(steps)
    assert [record.metrics["lr"] for record in steps] == pytest.approx([LR * (n + 1) / WARMUP for n in range(3)])
    report = train_run.report()
    assert 0 < report["max_logprob_gap"] <= 1e-3, "vLLM samples from what verl has exported"
    assert all(record.metrics["tokens_compared"] == record.metrics["tokens"] > 0 for record in steps), (
        "none has the ratio 1"
    )
    assert report["max_probe_gap"] <= 1e-3
    asyncio.run(assert_trained_once(train_run.folder))
    asyncio.run(assert_exported(train_run.folder))


def is_rays_own(child: psutil.Process) -> bool:
    """Whether Ray ends a process by itself; one that has ended meanwhile is nobody's."""
    try:
        return child.name() in RAYS_OWN
    except psutil.NoSuchProcess:
        return True


def by_id(run: Any) -> dict[str, Rollout]:
    return {rollout.id: rollout for rollout in run.rollouts()}


async def assert_trained_once(folder: Path) -> None:
    """The torch engine, which takes each recorded step once, comes to the same weights."""
    algorithm, engine, store = plugins().algorithm(ALGORITHM)(), TorchEngine(device="cpu"), await opened(folder)
    engine.open(MODEL, OptimizerConfig(lr=LR), seed=0)
    for record in await store.steps(folder.name):
        batch = algorithm.batch(await load_groups(store, await rollouts_of(store, record, 0), ()))
        rate = LR * min(1.0, record.step / WARMUP)
        engine.step(batch.samples, batch.loss_for(algorithm), rate)
    await store.close()
    expected, first = load_file(engine.weights(folder / "again.safetensors")), load_file(MODEL / "model.safetensors")
    engine.close()
    found = load_file(folder / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).abs().sum()) for name in found)
    moved = sum(float((found[name] - first[name]).abs().sum()) for name in found)
    assert off <= 0.02 * moved, "one of three steps would be a third"


async def assert_exported(folder: Path) -> None:
    """`transformers` loads the model that was written, and finds the logprobs with which vLLM sampled at the end."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    store = await opened(folder)
    last = await all_rollouts(store, folder.name, split="val", step=3)
    calls = [call for rollout in last for call in await store.transitions(rollout.id)]
    await store.close()
    assert len(last) == 4
    assert max(gap(model, call) for call in calls) <= 1e-3


def gap(model: Any, call: Transition) -> float:
    """The largest difference of a call's logprobs to a model's over the ids that its masks keep, in nats."""
    ids, mask = torch.tensor([*call.prompt_ids, *call.response_ids]), mask_of(call)
    assert mask is not None
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0, len(call.prompt_ids) - 1 :]
    kept = torch.from_numpy(mask.is_left_out)[:, None].repeat(1, logits.shape[1])
    tokens, listed, _ = mask.ids.expanded()
    kept[tokens, listed] = ~kept[tokens, listed]
    logprobs = logits.where(kept, -torch.inf).log_softmax(-1).gather(1, ids[len(call.prompt_ids) :, None])[:, 0]
    return float((logprobs - torch.tensor(call.logprobs)).abs().max())


async def opened(folder: Path) -> Store:
    store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
    await store.open()
    return store
