"""How many groups teach when tasks are chosen as `learnable`, and when they are shuffled, for a learner that is simulated.

A task is solved with a probability that grows with the learner's skill, which grows with each group whose rewards differ, and
with what was learned on the task itself. Nothing is sampled or trained: what is compared is the choice of tasks alone, with
as many groups for each. Printed are the share of groups that teach, and the mean success over all tasks at the end.

    python tests/bench/bench_order.py [--json FILE] [--seeds N] [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from lightning.trainer.plan import tasks_of_step, train_rollouts
from lightning.types import Status, Task
from lightning_samplers.task_choice import TaskChoice

GROUP, GROUPS = 8, 16
"""Rollouts of a group, and groups of a step."""
SPREAD, OWN = 4.0, 0.5
"""Deviation of the tasks' difficulties, and what a group that teaches takes from its own, in logits."""
SKILL = 0.15
"""What a step of groups that all teach takes from every task's."""


@dataclass(frozen=True)
class Compared:
    """One number of tasks: means over the seeds. `seconds` is the time of one choice."""

    tasks: int
    taught_learnable: float
    taught_shuffled: float
    ratio: float
    success_before: float
    success_learnable: float
    success_shuffled: float
    seconds: float


@dataclass
class Learner:
    """Solves tasks by chance."""

    hard: np.ndarray
    rng: np.random.Generator
    skill: float = 0.0

    @property
    def success(self) -> np.ndarray:
        """The probability of each task."""
        return 1.0 / (1.0 + np.exp(self.hard - self.skill))

    def step(self, places: Sequence[int]) -> tuple[list[float], int]:
        """The rewards of a step's groups, one after the other, and how many of them taught."""
        rewards, taught = [], 0
        for place in places:
            solved = self.rng.random(GROUP) < self.success[place]
            rewards += solved.astype(float).tolist()
            if 0 < solved.sum() < GROUP:
                taught += 1
                self.hard[place] -= OWN
        self.skill += SKILL * taught / len(places)
        return rewards, taught


class NoStepRewards:
    """Of a store what is read of a step: there are no rewards inside its rollouts, and nothing before it."""

    async def attempts_of(self, attempts):  # type: ignore[no-untyped-def]
        """One without rewards for each."""
        return [self for _ in attempts]

    step_rewards = ()


async def run(count: int, order: str, steps: int, seed: int) -> tuple[float, float, float, float]:
    """The share of groups that taught, the success before and after, and seconds of a choice."""
    rng = np.random.default_rng([seed, count])
    learner = Learner(rng.normal(0.0, SPREAD, count), rng)
    tasks = [Task(place, id=str(place)) for place in range(count)]
    choice, store, before = TaskChoice(tasks, seed), NoStepRewards(), learner.success.mean()
    taught, seconds = 0, 0.0
    for step in range(1, steps + 1):
        began = time.perf_counter()
        chosen = (
            choice.of_step(step, GROUP, 0, GROUPS)
            if order == "learnable"
            else tasks_of_step(tasks, step - 1, GROUPS, seed)
        )
        seconds += time.perf_counter() - began
        rewards, own = learner.step([int(task.id) for task in chosen])
        taught += own
        planned = train_rollouts("run", step, chosen, GROUP, 1)
        done = [
            replace(rollout, status=Status.SUCCEEDED, reward=reward)
            for rollout, reward in zip(planned, rewards, strict=True)
        ]
        await choice.learn(store, step, done)  # type: ignore[arg-type]
    return taught / (steps * GROUPS), float(before), float(learner.success.mean()), seconds / steps


async def compare(count: int, steps: int, seeds: int) -> Compared:
    """Both orders, with the same learners."""
    found = {
        order: np.mean([await run(count, order, steps, seed) for seed in range(seeds)], axis=0)
        for order in ("learnable", "shuffled")
    }
    ours, naive = found["learnable"], found["shuffled"]
    return Compared(count, ours[0], naive[0], ours[0] / naive[0], ours[1], ours[2], naive[2], ours[3])


def main() -> None:
    """Print a table; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    found = [asyncio.run(compare(count, given.steps, given.seeds)) for count in (64, 256, 1024, 4096)]
    sys.stdout.write("| tasks | groups that teach: ours | shuffled | ratio | success at first | ours | shuffled |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for one in found:
        sys.stdout.write(
            f"| {one.tasks} | {one.taught_learnable:.0%} | {one.taught_shuffled:.0%} | {one.ratio:.2f} "
            f"| {one.success_before:.2f} | {one.success_learnable:.2f} | {one.success_shuffled:.2f} |\n"
        )
    last = found[-1]
    says = f"{given.steps} steps of {GROUPS} groups of {GROUP}; a choice among {last.tasks} tasks takes {last.seconds:.4f} s\n"
    sys.stdout.write(says)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
