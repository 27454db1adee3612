"""Rollouts that go on while the engine trains, against sampling and training in turns, where a few agents are very slow.

Both train the same real engine (a tiny Qwen3 on a CPU) with the same agents, whose tool sleeps for a time drawn from a
lognormal distribution; slow rollouts are long ones, so that losing them would show. The policy server is scripted: what is
measured is how the time of agents and engine adds up, not how fast vLLM is. Useful tokens are those in the loss of a
committed step. Two samples of lengths are compared by the Kolmogorov-Smirnov statistic, the largest distance between their
distribution functions.

    python tests/bench/bench_async.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.gateway import Gateway, Upstream
from lightning.plugins import plugins
from lightning.policy_server.protocol import Probe, Update
from lightning.policy_server.weights import WeightsFolder
from lightning.runner.inline import InlineRunner
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.testing.tiny_models import make_tiny_model
from lightning.tracking.trackers import Trackers
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.loop import Loop
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Reporter
from lightning.trainer.training_data import all_rollouts
from lightning.types import LLM, Run, Task
from lightning_proof.audit import audit

STEPS, TASKS_PER_STEP, GROUP, BOUNDS, REPEATS = 12, 4, 4, (0, 1, 2), 1
PLACES = TASKS_PER_STEP * GROUP
"""Agents at once: as many as a step in turns can use."""
MEDIAN, SIGMA, LONGEST = 0.4, 1.2, 8.0
"""The tool's sleep in seconds: lognormal, cut off at the longest."""
WORDS_PER_SECOND = 8


@dataclass
class ScriptedPolicy:
    """A policy server that takes weights as vLLM does: calls in flight stand still meanwhile."""

    fake: FakeVLLM
    version: int = 0
    died: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Where the scripted server listens."""
        return self.fake.url

    @property
    def model(self) -> str:
        """The served name."""
        return self.fake.model

    alias, models, claim = model, (), ""

    async def start(self) -> None:
        """It runs already."""

    async def update(self, weights: Path, version: int, probes: Sequence[Probe] = ()) -> Update:
        """Pause, count, name the version, resume."""
        self.fake.pause()
        in_flight = self.fake.in_flight()
        self.version = version
        self.fake.resume()
        return Update(version, in_flight)

    async def healthy(self) -> bool:
        """Always."""
        return True

    async def usage(self) -> None:
        """It does not count."""

    async def wait_died(self) -> None:
        """Never."""
        await self.died.wait()

    async def restart(self, weights: Path | None, version: int) -> None:
        """Nothing to bring back."""

    async def close(self) -> None:
        """The fake is closed by its owner."""


@dataclass(frozen=True)
class Measured:
    """One run: wall seconds, trained tokens, staleness, groups nobody took, and the agents' lengths in tokens."""

    seconds: float
    tokens: float
    waited: float
    staleness_mean: float
    staleness_max: float
    discarded: int
    sampled: list[int]
    trained: list[int]


def slow_agent(seed: int) -> object:
    """An agent whose tool sleeps, and whose answer is the longer the longer it slept."""
    rng = random.Random(seed)

    async def agent(task: Task, llm: LLM) -> float:
        nap = min(MEDIAN * rng.lognormvariate(0.0, SIGMA), LONGEST)
        reward = rng.random()
        headers = {"authorization": f"Bearer {llm.api_key}"}
        said = [f"{task.input}"]
        async with aiohttp.ClientSession(headers=headers) as session:
            for words in (4, 4 + round(nap * WORDS_PER_SECOND)):
                body = {
                    "model": llm.model,
                    "messages": [{"role": "user", "content": " ".join(said)}],
                    "max_tokens": words,
                }
                async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                    reply.raise_for_status()
                    said.append((await reply.json())["choices"][0]["message"]["content"])
                if words == 4:
                    await asyncio.sleep(nap)
        return reward

    return agent


async def open_loop(resources: AsyncExitStack, folder: Path, model: Path, bound: int, seed: int) -> Loop:
    """Open a run of slow agents with a scripted policy server and a real engine; `resources` closes it."""
    settings = {
        "trainer.steps": STEPS,
        "trainer.tasks_per_step": TASKS_PER_STEP,
        "trainer.max_staleness": bound,
        "trainer.checkpoint_every": STEPS,
        "trainer.max_logprob_gap": 1e9,
        "runner.concurrency": PLACES,
    }
    config = with_settings(Config(), settings)
    algorithm = LightningRL("grpo", group_size=GROUP)
    fake = FakeVLLM(script=lambda body: Reply("so " * int(body["max_tokens"])))
    await resources.enter_async_context(fake)
    store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
    await store.open()
    resources.push_async_callback(store.close)
    described = {"algorithm": describe_algorithm(algorithm), "config": config.model_dump(mode="json")}
    run = await store.put_run(Run("run", "run", described))
    runner = InlineRunner(slow_agent(seed), config.runner)
    await runner.start()
    resources.push_async_callback(runner.close)
    gateway = Gateway(store, [Upstream(fake.url, fake.model)], config.gateway, secret=b"s" * 32)
    await gateway.start()
    resources.push_async_callback(gateway.close)
    engine = TorchEngine(device="cpu")
    resources.callback(engine.close)
    engine.open(model, OptimizerConfig(lr=1e-6), seed=0)
    weights_folder = WeightsFolder(config.policy_server, [model], folder)
    resources.callback(weights_folder.close)
    stack = Stack(run, config, folder, store, [ScriptedPolicy(fake)], gateway, runner, weights_folder)
    await stack.owner.open(stack.upstreams(), 0)
    tasks = [Task(f"question {number}") for number in range(64)]
    trackers = resources.enter_context(Trackers((), config, run="run", folder=folder, store=store))
    return Loop(stack, engine, AlgorithmSchedule.of(algorithm), tasks, [], (), Reporter(enabled=False), trackers)


async def measure(folder: Path, model: Path, bound: int, seed: int) -> Measured:
    """Train for some steps and read from the store what came of it."""
    async with AsyncExitStack() as resources:
        loop = await open_loop(resources, folder, model, bound, seed)
        began = time.perf_counter()
        await loop.run({})
        seconds = time.perf_counter() - began
        await prove(loop)
        return await read(loop, seconds)


async def prove(loop: Loop) -> None:
    """Audit the run."""
    report = await audit(loop.stack.store, "run")
    if not report.ok:
        raise RuntimeError(f"the audit found {report.findings[0]}")


async def read(loop: Loop, seconds: float) -> Measured:
    """The numbers of a finished run."""
    store = loop.stack.store
    records = await store.steps("run")
    waited = sum(point.values.get("seconds/rollout", 0.0) for point in await store.metrics("run"))
    rollouts = await all_rollouts(store, "run")
    calls = await store.transitions_of([(rollout.id, rollout.attempt) for rollout in rollouts])
    lengths = {
        rollout.id: sum(len(call.response_ids) for call in mine) for rollout, mine in zip(rollouts, calls, strict=True)
    }
    tokens = [record.metrics["tokens"] for record in records]
    stale = [record.metrics["staleness_mean"] for record in records]
    return Measured(
        seconds=seconds,
        tokens=sum(tokens),
        waited=waited,
        staleness_mean=float(np.average(stale, weights=tokens)),
        staleness_max=max(record.metrics["staleness_max"] for record in records),
        discarded=len({rollout.group for rollout in rollouts}) - sum(len(record.groups) for record in records),
        sampled=list(lengths.values()),
        trained=[lengths[name] for record in records for name, _ in record.rollouts],
    )


def distance(one: list[int], other: list[int]) -> float:
    """The Kolmogorov-Smirnov statistic of two samples."""
    first, second = np.sort(one), np.sort(other)
    places = np.concatenate([first, second])
    below = [np.searchsorted(sample, places, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def compare(runs: dict[int, list[Measured]]) -> dict[str, float]:
    """Every bound beside the runs in turns."""
    turns = [length for run in runs[0] for length in run.trained]
    found: dict[str, float] = {}
    for bound, mine in runs.items():
        trained = [length for run in mine for length in run.trained]
        sampled = [length for run in mine for length in run.sampled]
        rate = statistics.median(run.tokens / run.seconds for run in mine)
        name = f"staleness_{bound}"
        found |= {
            f"{name}_useful_tokens_per_second": rate,
            f"{name}_ratio_to_turns": rate / statistics.median(run.tokens / run.seconds for run in runs[0]),
            f"{name}_seconds_per_step": statistics.median(run.seconds for run in mine) / STEPS,
            f"{name}_trainer_waited_share": statistics.median(run.waited / run.seconds for run in mine),
            f"{name}_mean": statistics.mean(run.staleness_mean for run in mine),
            f"{name}_max": max(run.staleness_max for run in mine),
            f"{name}_groups_discarded": sum(run.discarded for run in mine),
            f"{name}_ks_trained_to_sampled": distance(trained, sampled),
            f"{name}_ks_trained_to_turns": distance(trained, turns),
            f"{name}_ks_first_half_to_sampled": distance(trained[: len(trained) // 2], sampled),
        }
    count = len(turns)
    found["ks_of_equal_distributions_95_percent"] = 1.358 * (2 / count) ** 0.5
    found["ks_of_equal_distributions_95_percent_half"] = 1.358 * (3 / count) ** 0.5
    return found


async def main(out: Path | None = None) -> dict[str, float]:
    """Measure, print a table, write JSON to `out`."""
    runs: dict[int, list[Measured]] = {bound: [] for bound in BOUNDS}
    with tempfile.TemporaryDirectory() as name:
        model = await asyncio.to_thread(make_tiny_model, Path(name) / "model", vocab=32_000)
        for repeat in range(REPEATS):
            for bound in BOUNDS:  # in turn, so that a busy machine slows all of them
                folder = Path(name) / f"{bound}-{repeat}"
                folder.mkdir()
                runs[bound].append(await measure(folder, model, bound, seed=repeat))
    found = compare(runs)
    sys.stdout.write("".join(f"{name:<52}{value:>16,.6g}\n" for name, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    asyncio.run(main(parser.parse_args().json))
