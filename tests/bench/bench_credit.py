"""Every credit on every bifurcation task: how near it comes to the true advantages, and what that does to the gradient.

The tasks and the metrics are `lightning.testing`'s; each score is the mean over some seeds, with its deviation over them. All
credits see the same rollouts. Estimator: `rloo`, and `grpo` in two rows. The critic is given exact values, and values with a
normal error, drawn anew for each seed. The rows of trees have groups of `TRUNKS` rollouts and their branches, which sample as
many calls as the others; the table after the metrics is what a call is worth, whatever there were. The last ones are of trees
by `entropy`, where the policy is sure of some answers: of those that decide, or of the others.

    python tests/bench/bench_credit.py [--json FILE] [--seeds N] [--groups N]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from lightning.credit import Credit, grpo
from lightning.plugins import plugins
from lightning.testing import CreditScore, DecisionTask, TreeSampling, bifurcation_tasks, score_credits
from lightning.testing.decisions import DecisionPath, walk
from lightning_branching.branch_points import branch_points
from lightning_credits import Branched, Critic, LeaveOneOut

VALUE_ERROR = 0.2
SURE = 0.9
SIZE, TRUNKS = 8, 4
METRICS = ("correlation", "bias", "variance", "cosine", "slope", "calls")
Score = Callable[..., dict[str, CreditScore]]


def rows(task: DecisionTask, groups: int, seed: int) -> dict[str, CreditScore]:
    """The scores of one seed, by the name of the row."""
    score: Score = partial(score_credits, task=task, groups=groups, seed=seed)
    known = {name: plugins().credit(name) for name in plugins().names("credits") if name not in ("branch", "judge")}
    critics: Mapping[str, Credit] = {"critic": Critic(), "critic, lam 0": Critic(lam=0.0)}
    exact = {f"{name}, exact": credit for name, credit in critics.items()}
    wrong = {f"{name}, error {VALUE_ERROR}": credit for name, credit in critics.items()}
    named = {name: credit for name, credit in known.items() if name != "critic"}
    return {
        **score({**named, "leave-one-out, prior 0": LeaveOneOut(0.0), **exact}),
        **score(wrong, value_error=VALUE_ERROR),
        **score({f"{name}, grpo": known[name] for name in ("identical", "weighted-variance")}, advantage=grpo),
        **trees(score, known, rate(task, TRUNKS)),
    }


def trees(score: Score, known: Mapping[str, Credit], each: float) -> dict[str, CreditScore]:
    """Groups with branches. Nearly all answers in these tasks are equally uncertain: see `sure_of` for `entropy`."""
    branch, plain, unshared = Branched(), Branched(prior=0.0), Branched(shared=False)
    others = {f"{name}, tree": known[name] for name in ("identical", "leave-one-out")}
    randomly = {"branch, random": branch, "branch, prior 0": plain, "branch, not shared": unshared, **others}
    return {
        **score(randomly, tree=TreeSampling(branch_points, TRUNKS)),
        **score({"branch, rate": branch}, tree=TreeSampling(branch_points, TRUNKS, per_call=each)),
        **score({"branch, variance": branch}, tree=TreeSampling(branch_points, TRUNKS, "variance")),
        **score({"branch, 2 trunks": branch}, tree=TreeSampling(branch_points, 2)),
        **score({"branch, 6 trunks": branch}, tree=TreeSampling(branch_points, 6)),
    }


def by_entropy(task: DecisionTask, groups: int, seed: int) -> dict[str, CreditScore]:
    """The scores of one seed of trees by uncertainty, beside random ones and groups without branches."""
    score: Score = partial(score_credits, task=task, groups=groups, seed=seed)
    return {
        **score({"identical": plugins().credit("identical")}),
        **score({"branch, random": Branched()}, tree=TreeSampling(branch_points, TRUNKS)),
        **score({"branch, entropy": Branched()}, tree=TreeSampling(branch_points, TRUNKS, "entropy")),
    }


def sure_of(task: DecisionTask, decisive: bool) -> DecisionTask:
    """The task with a policy that gives `SURE` to the first action of each state that decides, or of each that does not.

    A state decides if one of its advantages is at least half as large as the largest of all.
    """
    truth = task.truth()
    sizes = np.abs(truth.advantages).max(axis=1) * truth.trained
    states = {}
    for (name, state), size in zip(task.states.items(), sizes, strict=True):
        others = len(state.actions) - 1
        if others and (size >= sizes.max() / 2) == decisive:
            probabilities = [SURE] + [(1 - SURE) / others] * others
            pairs = zip(state.actions, probabilities, strict=True)
            state = replace(state, actions=tuple(replace(action, probability=each) for action, each in pairs))
        states[name] = state
    return replace(task, states=states)


def rate(task: DecisionTask, trunks: int) -> float:
    """How many branches each call may have for a group to cost what `SIZE` rollouts do, by 2,000 rollouts of its own."""
    rng = np.random.default_rng(1)
    trained = task.truth().trained
    paths = [walk(task, DecisionPath(), rng).states for _ in range(2000)]
    lengths = sum(map(len, paths))
    once = sum(len(path) - place for path in paths for place in range(1, len(path)) if trained[path[place]])
    return (SIZE - trunks) / trunks * lengths / once


def measured(
    rows: Callable[[DecisionTask, int, int], dict[str, CreditScore]],
    tasks: Mapping[str, DecisionTask],
    groups: int,
    seeds: int,
) -> dict[str, dict[str, dict[str, tuple[float, float] | None]]]:
    """For each task and each of the rows, the `summary` over seeds."""
    found = {}
    for name, task in tasks.items():
        runs = [rows(task, groups, seed) for seed in range(seeds)]
        found[name] = {row: summary([run[row] for run in runs]) for row in runs[0]}
    return found


def summary(scores: Sequence[CreditScore]) -> dict[str, tuple[float, float] | None]:
    """Mean and deviation over seeds of each metric; None where a seed found no signal at all."""
    found: dict[str, tuple[float, float] | None] = {}
    for metric in METRICS:
        values = [getattr(score, metric) for score in scores]
        whole = all(map(math.isfinite, values))
        found[metric] = (statistics.fmean(values), statistics.stdev(values)) if whole else None
    return found


def show(metric: str, results: Mapping[str, Mapping[str, Mapping[str, tuple[float, float] | None]]]) -> None:
    """One metric, a row for each credit and a column for each task: the numbers of docs/data/credit.csv."""
    tasks = list(results)
    sys.stdout.write(f"\n{metric}\n\n| | {' | '.join(tasks)} |\n|{'---|' * (1 + len(tasks))}\n")
    for row in results[tasks[0]]:
        cells = (results[task][row][metric] for task in tasks)
        shown = ("none" if cell is None else f"{cell[0]:.2f} ± {cell[1]:.2f}" for cell in cells)
        sys.stdout.write(f"| {row} | {' | '.join(shown)} |\n")
    sys.stdout.flush()


def show_worth(title: str, results: Mapping[str, Mapping[str, Mapping[str, tuple[float, float] | None]]]) -> None:
    """Variance times calls, as a part of `identical`'s: below 1, a gradient as good needs fewer sampled calls."""
    tasks = list(results)
    sys.stdout.write(f"\n{title}\n\n| | {' | '.join(tasks)} |\n|{'---|' * (1 + len(tasks))}\n")
    for row in results[tasks[0]]:
        cells = []
        for task in tasks:
            found = [results[task][name][metric] for name in (row, "identical") for metric in ("variance", "calls")]
            means = [cell[0] for cell in found if cell is not None]
            cells.append(f"{means[0] * means[1] / (means[2] * means[3]):.2f}" if len(means) == 4 else "none")
        sys.stdout.write(f"| {row} | {' | '.join(cells)} |\n")
    sys.stdout.flush()


def main() -> None:
    """Print the tables, and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=200)
    given = parser.parse_args()
    began = time.process_time()
    tasks = bifurcation_tasks()
    results = measured(rows, tasks, given.groups, given.seeds)
    for metric in METRICS:
        show(metric, results)
    show_worth("variance for each call", results)
    policies = {
        "as it is": tasks,
        "unsure where it matters": {name: sure_of(task, False) for name, task in tasks.items()},
        "sure where it matters": {name: sure_of(task, True) for name, task in tasks.items()},
    }
    trees_of = {policy: measured(by_entropy, of, given.groups, given.seeds) for policy, of in policies.items()}
    for policy, found in trees_of.items():
        show_worth(f"variance for each call, the policy {policy}", found)
        show("bias", found)
    took = time.process_time() - began
    sys.stdout.write(f"\n{given.seeds} seeds of {given.groups} groups of {SIZE} rollouts; {took:.0f} CPU-seconds\n")
    if given.json:
        kept = {
            "seeds": given.seeds,
            "groups": given.groups,
            "cpu_seconds": took,
            "tasks": results,
            "trees by entropy": trees_of,
        }
        given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
