"""A recorded run, made by hand so that every time in it is known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config, with_settings
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.runs import describe_algorithm
from lightning.types import Outcome, Rollout, Run, StepRecord, Task, Transition, logprobs, token_ids

STEPS, TASKS, GROUP, PLACES = 3, 2, 2, 2
CALL, TOOL, LEAD, TRAIN = 1.0, 4.0, 0.5, 2.0
"""Seconds of a call, of the tool between two calls, of the agent before its first call, of training."""


def call(rollout: str, seq: int, at: float, prompt: list[int], response: list[int], tools: int = 0) -> Transition:
    return Transition(
        rollout, 1, seq, f"{rollout}/{seq}", token_ids(prompt), token_ids(response), logprobs([0.0] * len(response)),
        started_at=at, ended_at=at + CALL, tool_calls=tuple(f"tool-{index}" for index in range(tools)),
    )  # fmt: skip


async def record(store: Store, run: str = "run") -> None:
    """Steps of four rollouts, two at a time, one of two groups of a step trained; each rollout calls, runs a tool, calls."""
    config = with_settings(Config(), {"trainer.tasks_per_step": TASKS, "runner.concurrency": PLACES})
    algorithm = describe_algorithm(LightningRL("grpo", group_size=GROUP))
    described = {"model": "models/tiny", "algorithm": algorithm, "config": config.model_dump(mode="json")}
    await store.put_run(Run(run, run, described, 1000.0))
    for step in range(1, STEPS + 1):
        groups = [f"{run}/{step}/{task}" for task in range(TASKS)]
        names = [f"{group}/{index}" for group in groups for index in range(GROUP)]
        made = [
            Rollout(name, run, Task(place // GROUP), groups[place // GROUP], step=step, index=place % GROUP)
            for place, name in enumerate(names)
        ]
        await store.create_rollouts(made)
        await store.lease(run, "worker", limit=len(made))
        for place, name in enumerate(names):
            start = 1000.0 * step + (place // PLACES) * (LEAD + 2 * CALL + TOOL)
            first, second = start + LEAD, start + LEAD + CALL + TOOL
            await store.append([call(name, 0, first, [1, 2, 3, 4 + place // GROUP], [7] * 10, tools=2)])
            seen = [1, 2, 3, 4 + place // GROUP, *[7] * 10]
            await store.append([call(name, 1, second, [*seen, 8, 9], [7] * 5)])
            await store.complete(name, 1, Outcome(reward=float(place % 2), seconds=LEAD + 2 * CALL + TOOL))
        trained = tuple((name, 1) for name in names[:GROUP])
        await store.commit_step(
            StepRecord(
                run,
                step,
                step,
                trained,
                ("d",) * GROUP,
                f"digest {step}",
                metrics={"staleness_max": 0.0},
                groups=tuple(groups),
            )
        )
        seconds = {"rollout": 2 * (LEAD + 2 * CALL + TOOL), "train": TRAIN, "checkpoint": 0.25, "update": 0.5}
        await store.log_metrics(run, step, {f"seconds/{phase}": value for phase, value in seconds.items()})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded run."""
    folder = tmp_path_factory.mktemp("recorded")

    async def fill() -> None:
        store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
        await store.open()
        await record(store, folder.name)
        await store.close()

    asyncio.run(fill())
    return folder
