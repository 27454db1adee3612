"""What the planner says of runs that are then made, from one recorded run: fewer places, slower tools, rollouts that go on.

One run in turns is recorded; the planner is calibrated on its store and simulates each of the other settings, which it has not
seen; each is run by the real loop, with gateway and store, in a process of its own, all at once. Tools, the policy server
(scripted, with vLLM's shapes) and the engine sleep instead of computing, so that what is compared is how times add up.

A step lasts as long as its slowest rollouts, so a few steps are a matter of luck. Eight of them, planned from eight, are off by
more than 15 % every third time where tools are twice as slow and every fifth time with `max_staleness` 1, even if the measured
run is simulated, too. Hence the number of steps, and two more numbers for every plan: the standard error of its error, and
the error of the same simulation on the very groups that the measured run drew, which is the planner's own.

    python tests/bench/bench_plan.py [--json FILE] [--only NAME ...] [--runs FOLDER] [--publish]

Nine minutes; the machine should do nothing else. `--runs` keeps the runs, and what has finished there is not run again;
`--publish` writes docs/data/planning.json and the table of docs/planning.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import aiohttp
import numpy as np
from bench_async import ScriptedPolicy
from compare.page import replace_table
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.sample import FloatArray, Sample, span_digest
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.gateway import Gateway, Upstream
from lightning.losses.protocol import Loss
from lightning.plugins import plugins
from lightning.policy_server.weights import WeightsFolder
from lightning.runner.inline import InlineRunner
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.tracking.trackers import Trackers
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.loop import Loop
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Reporter
from lightning.types import LLM, Run, Task, token_ids
from lightning_planner.calibration import Calibration, calibrate
from lightning_planner.costs import Changes, Schedule, draw
from lightning_planner.planner import LABEL, Target, calibrated, make_plan
from lightning_planner.recorded import Recorded, read_run, recorded_config
from lightning_planner.simulation import simulate

GROUP, SEEDS, BATCH = 4, 8, 8
"""Rollouts of a group, simulations of each plan, and steps whose mean is taken for independent of the others."""
MEDIAN, SIGMA, LONGEST = 0.6, 0.8, 6.0
"""The tool's sleep in seconds: lognormal, cut off at the longest."""
DELAY, TOKEN_DELAY = 0.2, 0.03
"""Seconds of a call until its first token, and between two of them."""
TRAIN, TRAIN_TOKEN, UPDATE = 1.0, 0.0005, 0.2
"""Seconds of a step's training, of each token of it, and of writing the weights."""
TARGET = 0.15
"""How far off a prediction may be, as a share of what was measured."""
DONE = "done"
"""The file that says that a run has come to its end."""
DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Setting:
    """One run of so many steps: what the planner can change."""

    steps: int = 40
    places: int = 16
    tasks_per_step: int = 4
    bound: int = 0
    tool_scale: float = 1.0


RECORDED = "recorded"
SETTINGS = {
    RECORDED: Setting(),
    "4 places": Setting(steps=24, places=4),
    "8 groups a step": Setting(steps=32, tasks_per_step=8),
    "tools twice as slow": Setting(tool_scale=2.0),
    "max_staleness 1": Setting(steps=80, bound=1),
    "max_staleness 2": Setting(steps=80, bound=2),
    "max_staleness 2, 8 places": Setting(steps=56, bound=2, places=8),
}


@dataclass(frozen=True)
class Compared:
    """A plan and the run that was then made. `planned` and `measured` are seconds of a step without the first one,
    `error_se` the standard error of `error`; `same_groups` is simulated on the measured run's own groups."""

    plan_for: str
    steps: int
    planned: float
    measured: float
    error: float
    error_se: float
    within_target: bool
    same_groups: float
    same_groups_error: float
    staleness_planned: float
    staleness_measured: float


@dataclass(frozen=True)
class Found:
    """All of it. `replay_error` is that of the recorded run played back, `calls_explained` the share of the variance of its
    calls' durations that the costs explain."""

    label: str
    replay_error: float
    calls_explained: float
    plans: tuple[Compared, ...]


class SleepyEngine:
    """An engine that only takes its time."""

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int, head: object = None) -> None:
        """Nothing to open."""

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """All 0."""
        return [np.zeros(len(sample), np.float32) for sample in samples]

    values = logprobs

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
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
        file.write_bytes(struct.pack("<Q", 2) + b"{}")
        return file

    def close(self) -> None:
        """Nothing to close."""


def sleepy_agent(seed: int, scale: float) -> object:
    """An agent that calls a tool, which sleeps, as often as it is told to, and then answers."""
    rng = random.Random(seed)

    async def agent(task: Task, llm: LLM) -> float:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        said: list[dict[str, object]] = [{"role": "user", "content": f"{task.input}"}]
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                body = {"model": llm.model, "messages": said}
                async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                    reply.raise_for_status()
                    message = (await reply.json())["choices"][0]["message"]
                if not message.get("tool_calls"):
                    return rng.random()
                said.append(message)
                for call in message["tool_calls"]:
                    await asyncio.sleep(scale * min(MEDIAN * rng.lognormvariate(0.0, SIGMA), LONGEST))
                    said.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})

    return agent


def answer(body: object) -> Reply:
    """A tool call once, twice or three times, as often for every rollout of a task, then words."""
    assert isinstance(body, dict)
    done = sum(message["role"] == "tool" for message in body["messages"])
    number = int(body["messages"][0]["content"].split()[-1])
    if done <= number % 3:
        return Reply("", tool_calls=[ToolCall("look", "{}")], delay=DELAY, token_delay=TOKEN_DELAY)
    return Reply("so it is what it is", delay=DELAY, token_delay=TOKEN_DELAY)


async def run(folder: Path, setting: Setting, seed: int) -> None:
    """Train for some steps."""
    folder.mkdir(parents=True)
    config = with_settings(
        Config(),
        {
            "trainer.steps": setting.steps,
            "trainer.tasks_per_step": setting.tasks_per_step,
            "trainer.max_staleness": setting.bound,
            "trainer.checkpoint_every": setting.steps,
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
        weights_folder = WeightsFolder(config.policy_server, [folder], folder)
        resources.callback(weights_folder.close)
        stack = Stack(stored, config, folder, store, [ScriptedPolicy(fake)], gateway, runner, weights_folder)
        await stack.owner.open(stack.upstreams(), 0)
        trackers = resources.enter_context(Trackers((), config, run="run", folder=folder, store=store))
        tasks = [Task(f"question {number}") for number in range(64)]
        loop = Loop(
            stack, SleepyEngine(), AlgorithmSchedule.of(algorithm), tasks, [], (), Reporter(enabled=False), trackers
        )
        await loop.run({})


async def read(folder: Path) -> Recorded:
    """What the planner reads of a run."""
    store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
    await store.open()
    try:
        return await read_run(store, "run")
    finally:
        await store.close()


async def measured(runs: Path, names: Sequence[str]) -> dict[str, Recorded]:
    """Make the runs that are not there yet, each in a process of its own, all at once; read all of them."""
    missing = [name for name in names if not (runs / name / DONE).is_file()]
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, "--runs", str(runs), "--make", name)
        for name in missing
    ]
    codes = await asyncio.gather(*(process.wait() for process in processes))
    if failed := [name for name, code in zip(missing, codes, strict=True) if code]:
        raise RuntimeError(f"these runs failed, see above: {', '.join(failed)}")
    return {name: await read(runs / name) for name in names}


async def make(runs: Path, name: str) -> None:
    """One run to its end; what is there of an earlier try is lost."""
    shutil.rmtree(runs / name, ignore_errors=True)
    await run(runs / name, SETTINGS[name], list(SETTINGS).index(name))
    (runs / name / DONE).touch()


def compare(runs: dict[str, Recorded]) -> Found:
    """Each plan beside the run that was made."""
    recorded = runs[RECORDED]
    calibration, played = calibrated(recorded)
    plans = tuple(_compare(recorded, calibration, name, real) for name, real in runs.items() if name != RECORDED)
    return Found(LABEL, played.error, played.calls, plans)


def _compare(recorded: Recorded, calibration: Calibration, name: str, real: Recorded) -> Compared:
    setting = SETTINGS[name]
    schedule = replace(
        recorded.schedule,
        concurrency=setting.places,
        tasks_per_step=setting.tasks_per_step,
        max_staleness=setting.bound,
        steps=setting.steps,
        checkpoint_every=setting.steps,
    )
    plans = []
    for seed in range(SEEDS):
        # As if other groups had been recorded, of the same kind: how far plans lie apart says how much that matters.
        rng = random.Random(seed)
        again = replace(calibration, steady=tuple(rng.choices(calibration.steady, k=len(calibration.steady))))
        changes = Changes(tool_scale=setting.tool_scale)
        plans.append(make_plan(recorded, again, Target(schedule, recorded_config(recorded.config), changes, seed=seed)))
    totals = [plan.step.total for plan in plans]
    planned, seconds = fmean(totals), [step.total for step in real.steady]
    batches = [fmean(seconds[at : at + BATCH]) for at in range(0, len(seconds) - BATCH + 1, BATCH)]
    spread = (stdev(totals) / planned) ** 2 + (stdev(batches) / len(batches) ** 0.5 / fmean(seconds)) ** 2
    error, same = planned / fmean(seconds) - 1.0, _on_its_groups(calibration, schedule, real)
    return Compared(
        plan_for=name,
        steps=len(seconds),
        planned=planned,
        measured=fmean(seconds),
        error=error,
        error_se=spread**0.5,
        within_target=abs(error) <= TARGET,
        same_groups=same,
        same_groups_error=same / fmean(seconds) - 1.0,
        staleness_planned=fmean(plan.staleness_mean for plan in plans),
        staleness_measured=fmean([age for step in real.steady if (age := step.staleness[0]) is not None] or [math.nan]),
    )


def _on_its_groups(calibration: Calibration, schedule: Schedule, real: Recorded) -> float:
    """Seconds of a step with the recorded run's costs and the groups of another run, in the order in which it had them."""
    own = calibrate(real)
    teams = chain(own.teams, draw(own.steady, schedule.group_size, 0))
    return simulate(schedule, calibration.costs, teams).mean(lambda step: step.total)


def table(found: Found) -> str:
    """The plans as a table of the documentation."""
    lines = [
        "| plan for | steps | planned, s | measured, s | error | on the same groups | staleness, planned and measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found.plans:
        error = f"{one.error:+.0%} ± {2 * one.error_se:.0%}"
        stale = f"{one.staleness_planned:.2f} and {one.staleness_measured:.2f}" if one.staleness_measured > 0 else ""
        lines.append(
            f"| {one.plan_for} | {one.steps} | {one.planned:.2f} | {one.measured:.2f} "
            f"| {error if one.within_target else f'**{error}**'} | {one.same_groups_error:+.0%} | {stale} |"
        )
    return "\n".join(lines)


async def main(runs: Path, out: Path | None, only: Sequence[str], publish: bool) -> None:
    """Record, plan, measure; print the table, write JSON to `out`."""
    chosen = [name for name in SETTINGS if name == RECORDED or not only or name in only]
    found = compare(await measured(runs, chosen))
    played = f"Played back, the recorded run comes out {found.replay_error:+.1%}."
    sys.stdout.write(f"{LABEL}\n{table(found)}\n{played}\n")
    text = json.dumps(asdict(found), indent=1) + "\n"
    if out is not None:
        out.write_text(text)
    if publish:
        (DOCS / "data" / "planning.json").write_text(text)
        replace_table(DOCS / "planning.md", "plans", f"{table(found)}\n\n{played}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", nargs="*", default=(), choices=[*SETTINGS][1:], help="only these plans")
    parser.add_argument("--runs", type=Path, help="folder in which the runs are kept")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/data/planning.json and the table of docs/planning.md"
    )
    parser.add_argument("--make", choices=[*SETTINGS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = given.runs or Path(name)
        asyncio.run(make(folder, given.make) if given.make else main(folder, given.json, given.only, given.publish))
