"""Every credit on every bifurcation task: how near it comes to the true advantages, and what that does to the gradient.

The tasks and the metrics are `lightning.testing`'s; each score is the mean over some seeds, with its deviation over them. All
credits see the same rollouts. Estimator: `rloo`, and `grpo` in two rows. The critic is given exact values, and values with a
normal error, drawn anew for each seed.

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
from functools import partial
from pathlib import Path

from lightning.credit import Credit, Critic, LeaveOneOut, grpo
from lightning.plugins import plugins
from lightning.testing import CreditScore, DecisionTask, bifurcation_tasks, score_credits

VALUE_ERROR = 0.2
METRICS = ("correlation", "bias", "variance", "cosine", "slope")
Score = Callable[..., dict[str, CreditScore]]


def rows(task: DecisionTask, groups: int, seed: int) -> dict[str, CreditScore]:
    """The scores of one seed, by the name of the row."""
    score: Score = partial(score_credits, task=task, groups=groups, seed=seed)
    known = {name: plugins().credit(name) for name in plugins().names("credits")}
    critics: Mapping[str, Credit] = {"critic": Critic(), "critic, lam 0": Critic(lam=0.0)}
    exact = {f"{name}, exact": credit for name, credit in critics.items()}
    wrong = {f"{name}, error {VALUE_ERROR}": credit for name, credit in critics.items()}
    named = {name: credit for name, credit in known.items() if name != "critic"}
    return {
        **score({**named, "leave-one-out, prior 0": LeaveOneOut(0.0), **exact}),
        **score(wrong, value_error=VALUE_ERROR),
        **score({f"{name}, grpo": known[name] for name in ("identical", "weighted-variance")}, advantage=grpo),
    }


def summary(scores: Sequence[CreditScore]) -> dict[str, tuple[float, float] | None]:
    """Mean and deviation over seeds of each metric; None where a seed found no signal at all."""
    found: dict[str, tuple[float, float] | None] = {}
    for metric in METRICS:
        values = [getattr(score, metric) for score in scores]
        whole = all(map(math.isfinite, values))
        found[metric] = (statistics.fmean(values), statistics.stdev(values)) if whole else None
    return found


def show(metric: str, results: Mapping[str, Mapping[str, Mapping[str, tuple[float, float] | None]]]) -> None:
    """One metric, a row for each credit and a column for each task, as the tables stand in docs/credit.md."""
    tasks = list(results)
    sys.stdout.write(f"\n{metric}\n\n| | {' | '.join(tasks)} |\n|{'---|' * (1 + len(tasks))}\n")
    for row in results[tasks[0]]:
        cells = (results[task][row][metric] for task in tasks)
        shown = ("none" if cell is None else f"{cell[0]:.2f} ± {cell[1]:.2f}" for cell in cells)
        sys.stdout.write(f"| {row} | {' | '.join(shown)} |\n")
    sys.stdout.flush()


def main() -> None:
    """Print the tables, and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=200)
    given = parser.parse_args()
    began = time.process_time()
    results = {}
    for name, task in bifurcation_tasks().items():
        runs = [rows(task, given.groups, seed) for seed in range(given.seeds)]
        results[name] = {row: summary([run[row] for run in runs]) for row in runs[0]}
    for metric in METRICS:
        show(metric, results)
    took = time.process_time() - began
    sys.stdout.write(f"\n{given.seeds} seeds of {given.groups} groups of 8 rollouts; {took:.0f} CPU-seconds\n")
    if given.json:
        given.json.write_text(
            json.dumps({"seeds": given.seeds, "groups": given.groups, "cpu_seconds": took, "tasks": results}, indent=1)
        )


if __name__ == "__main__":
    main()
