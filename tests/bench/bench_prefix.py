"""How many calls must be sampled until a learner solves a task of several calls: groups from the task, and from prefixes too.

The learner is simulated: each call of a rollout goes right with a probability, and only a rollout without a mistake is
rewarded. GRPO moves the logits of the calls that were sampled, by steps of Adam: these have one length, however strong a
gradient is. Either all calls need one skill, or each call one of its own, so that nothing carries over between calls. Where
groups begin is chosen by the code of `trainer.sampling = prefix`. Either a step has its groups, or with dynamic sampling as
many waves of them as it takes until enough teach. Printed are the calls that were sampled until the success on held-out tasks,
from their beginning, came to some bars.

    python tests/bench/bench_prefix.py [--json FILE] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from lightning.types import Rollout, Task
from lightning_branching.prefix_choice import Beginning, Begun, Chooser, Parent, Place

GROUP, GROUPS, WAVES, TASKS = 8, 4, 8, 512
"""Rollouts of a group, groups of a wave, most waves of a step with dynamic sampling, and tasks."""
CALLS = (4, 8)
FIRST = (0.2, 0.02, 0.002)
"""How often the untrained learner solves the middle task."""
SPREAD = 0.5
"""Deviation of the tasks' difficulties."""
RATE, BETAS = 0.15, (0.9, 0.95)
"""Adam's learning rate, and how much it remembers of the gradient and of its square."""
BARS = (0.25, 0.5)
MOST = 60_000
"""Calls after which a run ends."""


@dataclass(frozen=True)
class Compared:
    """Means over the seeds. `reached` has for each bar the calls from tasks alone and with prefixes; None where a run did not
    come there. `ratios` are the first divided by the second."""

    calls: int
    first: float
    shared: bool
    dynamic: bool
    share: float
    reached: list[tuple[float | None, float | None]]
    ratios: list[float | None]
    seeds: int


class Learner:
    """Solves tasks of `calls` calls by chance. `shared`: all calls need one skill."""

    def __init__(self, calls: int, first: float, seed: int, *, shared: bool) -> None:
        self.calls, self.rng = calls, np.random.default_rng([seed, calls])
        begin = np.log(first ** (1 / calls) / (1 - first ** (1 / calls)))
        self.skills = np.full(1 if shared else calls, begin)
        self.mean, self.square, self.steps = np.zeros_like(self.skills), np.zeros_like(self.skills), 0
        self.hard = self.rng.normal(0.0, SPREAD, TASKS)
        self.held_out = self.rng.normal(0.0, SPREAD, 256)

    def chances(self, hard: float) -> np.ndarray:
        """The probability that each call goes right, shape (calls,)."""
        return np.broadcast_to(1.0 / (1.0 + np.exp(hard - self.skills)), self.calls)

    @property
    def success(self) -> float:
        """The mean success on held-out tasks."""
        return float(np.mean([np.prod(self.chances(hard)) for hard in self.held_out]))

    def learn(self, groups: Sequence[tuple[int, int, np.ndarray, np.ndarray]]) -> None:
        """Take a step. A group is its task, the number of its first call, whether each call went right, shape (rollouts,
        calls), and its rewards."""
        moved, count = np.zeros(len(self.skills)), 0
        for task, first, right, rewards in groups:
            if rewards.std() > 0:
                gains = (rewards - rewards.mean()) / rewards.std(ddof=1)
                found = gains[:, None] * (right[:, first:] - self.chances(self.hard[task])[first:])
                count += found.size
                if len(moved) == 1:
                    moved += found.sum()
                else:
                    moved[first:] += found.sum(axis=0)
        if count:
            self._step(moved * len(moved) / count)

    def _step(self, gradient: np.ndarray) -> None:
        """A step of Adam."""
        first, second = BETAS
        self.steps += 1
        self.mean = first * self.mean + (1 - first) * gradient
        self.square = second * self.square + (1 - second) * gradient**2
        size = np.sqrt(self.square / (1 - second**self.steps)) + 1e-8
        self.skills = self.skills + RATE * self.mean / (1 - first**self.steps) / size


def run(learner: Learner, seed: int, share: float, *, dynamic: bool) -> list[tuple[int, float]]:
    """The success on held-out tasks by the calls that were sampled; `share` is the setting `trainer.task_share`."""
    most = GROUPS * (WAVES if dynamic else 1)
    rng, chooser = np.random.default_rng([seed, 1]), Chooser()
    passed: dict[str, tuple[int, np.ndarray]] = {}
    curve, sampled, step = [(0, learner.success)], 0, 0
    while sampled < MOST and curve[-1][1] < max(BARS):
        step += 1
        found: list[Beginning] = []
        for name in chooser.skewed()[:most]:
            for begun in chooser.parents(name):
                if beginning := chooser.choose(name, parent_of(learner, begun, name), step):
                    found.append(beginning)
                break
        found = chooser.repeated(found, most, step)
        groups, told = [], []
        for place in range(most):
            if place % GROUPS == 0 and sum(rewards.std() > 0 for *_, rewards in groups) >= GROUPS:
                break
            begin = found.pop(0) if found and rng.random() >= share else None
            task = int(begin.parent.task.id) if begin else int(rng.integers(TASKS))
            first = begin.seq if begin else 0
            right = rng.random((GROUP, learner.calls)) < learner.chances(learner.hard[task])
            if begin:
                right[:, :first] = passed[begin.parent.id][1][:first]
            rewards = right.all(axis=1).astype(float)
            groups.append((task, first, right, rewards))
            sampled += GROUP * (learner.calls - first)
            names = [f"{step}/{place}/{index}" for index in range(GROUP)]
            if begin is None:
                passed |= {name: (task, row) for name, row in zip(names, right, strict=True)}
            told.append((begin, task, [Begun(*each) for each in zip(names, [1] * GROUP, rewards, strict=True)]))
        learner.learn(groups)
        for begin, task, group in told:
            if begin is None:
                chooser.add(str(task), step, group)
            else:
                parent = parent_of(learner, Begun(begin.parent.id, 1, float(begin.parent.reward or 0)), str(task))
                chooser.add_behind(str(task), step, parent, begin.seq, group)
        curve.append((sampled, learner.success))
    return curve


def parent_of(learner: Learner, begun: Begun, task: str) -> Parent:
    """A rollout with the calls at which groups may begin: all but the first."""
    rollout = Rollout(begun.rollout, "run", Task(task, id=task), "", reward=begun.reward, attempt=1)
    return Parent(rollout, tuple(Place(seq, 1 - seq / learner.calls) for seq in range(1, learner.calls)), begun.reward)


def reached(curve: Sequence[tuple[int, float]], bar: float) -> int | None:
    """After how many calls the success was at the bar."""
    return next((sampled for sampled, success in curve if success >= bar), None)


def compare(calls: int, first: float, seeds: int, share: float, *, shared: bool, dynamic: bool) -> Compared:
    """Both ways, with the same learners."""
    means: list[list[float | None]] = []
    for one in (1.0, share):
        curves = [run(Learner(calls, first, seed, shared=shared), seed, one, dynamic=dynamic) for seed in range(seeds)]
        found = [[reached(curve, bar) for curve in curves] for bar in BARS]
        means.append([statistics.fmean(map(float, row)) if None not in row else None for row in found])  # type: ignore[arg-type]
    pairs = list(zip(*means, strict=True))
    ratios = [None if task is None or prefix is None else task / prefix for task, prefix in pairs]
    return Compared(calls, first, shared, dynamic, share, pairs, ratios, seeds)


def main() -> None:
    """Print a table; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.5, help="the setting trainer.task_share")
    given = parser.parse_args()
    found = [
        compare(calls, first, given.seeds, given.share, shared=shared, dynamic=dynamic)
        for dynamic in (False, True)
        for shared in (True, False)
        for calls in CALLS
        for first in FIRST
    ]
    bars = " | ".join(f"calls until {bar:.2f}: task | prefix | ratio" for bar in BARS)
    sys.stdout.write(
        f"| groups of a step | skills | calls | success at first | {bars} |\n|{'---|' * (4 + 3 * len(BARS))}\n"
    )
    for one in found:
        cells = [
            "-" if value is None else f"{value:,.0f}" if place < 2 else f"{value:.1f}"
            for pair, ratio in zip(one.reached, one.ratios, strict=True)
            for place, value in enumerate((*pair, ratio))
        ]
        skills = "one" if one.shared else "one a call"
        groups = "until enough teach" if one.dynamic else str(GROUPS)
        sys.stdout.write(f"| {groups} | {skills} | {one.calls} | {one.first:g} | {' | '.join(cells)} |\n")
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
