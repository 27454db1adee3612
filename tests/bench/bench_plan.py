"""What the planner says of runs that are then made, from one recorded run: fewer places, slower tools, rollouts that go on.

One short run in turns is recorded; the planner is calibrated on its store and simulates each of the other settings; then each
is run by the real loop, with gateway and store. Tools, the policy server (scripted, with vLLM's shapes) and the engine sleep
instead of computing, so that what is compared is how times add up, and does not depend much on what else the machine does.

    python tests/bench/bench_plan.py [--json FILE] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import aiohttp
import numpy as np
from bench_async import ScriptedPolicy
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.digest import span_digest
from lightning.batch.sample import FloatArray, Sample
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.gateway import Gateway, Upstream
from lightning.losses.protocol import Loss
from lightning.planning.planner import Target, calibrated, make_plan, recorded_config
from lightning.planning.recorded import Recorded, read_run
from lightning.planning.work import Changes
from lightning.plugins import plugins
from lightning.runner.inline import InlineRunner
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.tracking import Trackers
from lightning.trainer.loop import Loop
from lightning.trainer.progress import Reporter
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.stack import Stack
from lightning.types import LLM, Run, Task, token_ids

STEPS, GROUP = 8, 4
MEDIAN, SIGMA, LONGEST = 0.6, 0.8, 6.0
"""The tool's sleep in seconds: lognormal, cut off at the longest."""
DELAY, TOKEN_DELAY = 0.2, 0.03
"""Seconds of a call until its first token, and between two of them."""
TRAIN, TRAIN_TOKEN, UPDATE = 1.0, 0.0005, 0.2
"""Seconds of a step's training, of each token of it, and of writing the weights."""
TARGET = 0.15
"""How far off a prediction may be, as a share of what was measured."""


@dataclass(frozen=True)
class Setting:
    """One run: what the planner can change."""

    places: int = 16
    tasks_per_step: int = 4
    bound: int = 0
    tool_scale: float = 1.0


RECORDED = Setting()
PLANNED = {
    "a quarter of the places": Setting(places=4),
    "twice the tasks": Setting(tasks_per_step=8),
    "tools twice as slow": Setting(tool_scale=2.0),
    "max_staleness 1": Setting(bound=1),
    "max_staleness 2": Setting(bound=2),
    "max_staleness 2, 8 places": Setting(bound=2, places=8),
}


class SleepyEngine:
    """An engine that only takes its time."""

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int, critic: bool = False) -> None:
        """Nothing to open."""

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """All 0."""
        return [np.zeros(len(sample), np.float32) for sample in samples]

    values = logprobs

    def step(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Sleep, and say that exactly these tokens were trained."""
        tokens = sum(map(len, samples))
        time.sleep(TRAIN + TRAIN_TOKEN * tokens)
        seen = {
            (span.rollout, span.attempt, span.seq): span_digest(
                token_ids(sample.ids[span.start : span.stop].tolist()), sample.logprobs[span.start : span.stop].tolist()
            )
            for sample in samples
            for span in sample.spans
        }
        return StepResult({"loss": 0.0, "max_logprob_gap": 0.0, "tokens": float(tokens)}, seen)

    def save(self, folder: Path) -> None:
        """Nothing to save."""
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, folder: Path) -> None:
        """Nothing to load."""

    def export(self, folder: Path) -> Path:
        """Nothing to export."""
        return folder

    def weights(self, file: Path) -> Path:
        """Sleep, and write nothing that counts."""
        time.sleep(UPDATE)
        file.write_bytes(b"")
        return file

    def close(self) -> None:
        """Nothing to close."""


def sleepy_agent(seed: int, scale: float) -> object:
    """An agent that calls a tool twice, which sleeps, and then answers."""
    rng = random.Random(seed)

    async def agent(task: Task, llm: LLM) -> float:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        said: list[dict[str, object]] = [{"role": "user", "content": f"{task.input}"}]
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(3):
                body = {"model": llm.model, "messages": said}
                async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                    reply.raise_for_status()
                    message = (await reply.json())["choices"][0]["message"]
                said.append(message)
                for call in message.get("tool_calls") or ():
                    await asyncio.sleep(scale * min(MEDIAN * rng.lognormvariate(0.0, SIGMA), LONGEST))
                    said.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        return rng.random()

    return agent


def answer(body: object) -> Reply:
    """A tool call twice, then words."""
    assert isinstance(body, dict)
    done = sum(message["role"] == "tool" for message in body["messages"])
    if done < 2:
        return Reply("", tool_calls=[ToolCall("look", "{}")], delay=DELAY, token_delay=TOKEN_DELAY)
    return Reply("so it is what it is", delay=DELAY, token_delay=TOKEN_DELAY)


async def run(folder: Path, setting: Setting, seed: int) -> Recorded:
    """Train for some steps, and read what the planner reads."""
    folder.mkdir()
    config = with_settings(
        Config(),
        {
            "trainer.steps": STEPS,
            "trainer.tasks_per_step": setting.tasks_per_step,
            "trainer.max_staleness": setting.bound,
            "trainer.checkpoint_every": STEPS,
            "trainer.max_logprob_gap": 1e9,
            "runner.concurrency": setting.places,
        },
    )
    algorithm = LightningRL("grpo", group_size=GROUP)
    async with AsyncExitStack() as resources:
        fake = FakeVLLM(script=answer)
        await resources.enter_async_context(fake)
        store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
        await store.open()
        resources.push_async_callback(store.close)
        described = {"algorithm": describe_algorithm(algorithm), "config": config.model_dump(mode="json")}
        stored = await store.put_run(Run("run", "run", described))
        runner = InlineRunner(sleepy_agent(seed, setting.tool_scale), config.runner)
        await runner.start()
        resources.push_async_callback(runner.close)
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], config.gateway, secret=b"s" * 32)
        await gateway.start()
        resources.push_async_callback(gateway.close)
        stack = Stack(stored, config, folder, store, ScriptedPolicy(fake), gateway, runner)
        await stack.owner.open(stack.upstreams(), 0)
        trackers = resources.enter_context(Trackers((), config, run="run", folder=folder, store=store))
        tasks = [Task(f"question {number}") for number in range(64)]
        loop = Loop(stack, SleepyEngine(), algorithm, tasks, [], (), Reporter(enabled=False), trackers)
        await loop.run({})
        return await read_run(store, "run")


def compare(recorded: Recorded, measured: dict[str, Recorded]) -> dict[str, float]:
    """Predicted and measured seconds of a step, and staleness."""
    calibration, played = calibrated(recorded)
    found = {"replay_error": played.error, "calls_explained": played.calls}
    for name, real in measured.items():
        setting = PLANNED[name]
        schedule = replace(
            recorded.schedule,
            concurrency=setting.places,
            tasks_per_step=setting.tasks_per_step,
            max_staleness=setting.bound,
            steps=STEPS,
        )
        changes = Changes(tool_scale=setting.tool_scale)
        plans = [
            make_plan(recorded, calibration, Target(schedule, recorded_config(recorded), changes, seed=seed))
            for seed in range(5)
        ]
        predicted = fmean(plan.step.total for plan in plans)
        seconds = fmean(step.total for step in real.steady)
        found |= {
            f"{name}: predicted, s": predicted,
            f"{name}: measured, s": seconds,
            f"{name}: error": predicted / seconds - 1.0,
            f"{name}: within target": float(abs(predicted / seconds - 1.0) <= TARGET),
        }
        if setting.bound:
            found |= {
                f"{name}: staleness predicted": fmean(plan.staleness_mean for plan in plans),
                f"{name}: staleness measured": fmean(step.staleness[0] for step in real.steady),
            }
    return found


async def main(out: Path | None = None, only: list[str] | None = None) -> dict[str, float]:
    """Record, plan, measure; print a table, write JSON to `out`."""
    with tempfile.TemporaryDirectory() as name:
        recorded = await run(Path(name) / "recorded", RECORDED, seed=0)
        measured = {}
        for number, (planned, setting) in enumerate(PLANNED.items()):
            if not only or planned in only:
                measured[planned] = await run(Path(name) / str(number), setting, seed=number + 1)
        found = compare(recorded, measured)
    sys.stdout.write("".join(f"{name:<52}{value:>16,.6g}\n" for name, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", nargs="*", help=f"only these of: {', '.join(PLANNED)}")
    given = parser.parse_args()
    asyncio.run(main(given.json, given.only))
