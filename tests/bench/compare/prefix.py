"""Prefixes beside rollouts from the task, with a real model: sampled tokens and seconds to the same held-out reward.

    python tests/bench/compare/prefix.py [--variants task prefix ...] [--seeds 0 1 2] [--steps N] [--publish]

The task is an exam of several questions of `lightning demo tiny`, one after the other. Only an exam without a mistake is
rewarded, which the untrained model seldom writes, so few groups teach anything. All arms are GRPO with the demonstration's own
model and settings, and differ in `trainer.sampling` and `trainer.task_share` alone; those until four groups teach have dynamic
sampling besides. Held-out exams always begin at their task.
One vLLM serves all runs: it is given the untrained weights before each. A finished run is one JSON file, so the same command
goes on where it was stopped. `--publish` writes a table of docs/benchmarks.md and its file in docs/data.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ablate import TRAIN_TASKS, run, serving, tell
from ablation_table import Result
from lightning import LLM, Task
from lightning.demos import Demo
from lightning.errors import LightningError
from lightning.plugins import plugins
from lightning_examples.raw_python.agent import agent as answer
from page import replace_table
from repeats import spread
from summary import machine
from variants import Variant

ROOT = Path(__file__).parents[3]
QUESTIONS = 3
"""Questions of an exam."""
TASK, PREFIX, MORE, TASK_UNTIL, PREFIX_UNTIL = "task", "prefix", "more", "task-dynamic", "prefix-dynamic"
_TINY = {"normalization": "token-mean", "clip_low": 0.2, "clip_high": 0.28}
"""What the demonstration's own algorithm has besides."""
_UNTIL = {**_TINY, "dynamic_sampling": True}
"""A step samples groups until as many teach as it has tasks, as in DAPO."""
VARIANTS: Mapping[str, Variant] = {
    TASK: Variant("grpo", _TINY, "every group from its task"),
    PREFIX: Variant("grpo", _TINY, "half behind prefixes (the default)", {"trainer.sampling": "prefix"}),
    MORE: Variant(
        "grpo", _TINY, "three quarters behind prefixes", {"trainer.sampling": "prefix", "trainer.task_share": 0.25}
    ),
    TASK_UNTIL: Variant("grpo", _UNTIL, "every group from its task, until four teach"),
    PREFIX_UNTIL: Variant("grpo", _UNTIL, "half behind prefixes, until four teach", {"trainer.sampling": "prefix"}),
}
BESIDE: Mapping[str, str] = {PREFIX: TASK, MORE: TASK, PREFIX_UNTIL: TASK_UNTIL}
"""The arm that each arm with prefixes is compared with."""
HEADS = (
    "groups",
    "seeds",
    "held-out reward at the end",
    "sampled tokens",
    "seconds",
    "groups that taught",
    "CPU-hours",
)
REACHED = (
    "groups", "seed", "held-out reward", "tokens to it, from the task", "with prefixes", "ratio", "ratio of seconds",
    "held-out rewards, from the task", "with prefixes",
)  # fmt: skip


def exam(task: Task, llm: LLM) -> dict[str, float]:
    """Answer all questions of an exam, and be told at the end whether there was no mistake."""
    asked: Any = task.input
    right = [answer(Task(question, expected), llm) for question, expected in asked]
    return {"reward": float(all(right)), "right": sum(right) / len(right)}


def of_questions(questions: Sequence[Task], each: int) -> list[Task]:
    """Exams of these questions, each once, `each` in an exam."""
    asked = [[str(one.input), one.expected] for one in questions]
    return [Task(asked[first : first + each]) for first in range(0, len(asked), each)]


def demo(questions: int = QUESTIONS) -> Demo:
    """An exam of so many questions, as a demonstration."""
    tiny = plugins().demo("tiny")()
    return replace(
        tiny,
        name="exam",
        agent=exam,
        tasks=lambda n, seed: of_questions(tiny.tasks(n * questions, seed), questions),
        val_tasks=lambda n: of_questions(tiny.val_tasks(n * questions), questions),
        settings={
            **tiny.settings,
            "trainer.steps": 12,
            "trainer.tasks_per_step": 4,
        },
    )


def reached(result: Result, bar: float) -> tuple[float, float] | None:
    """After how many sampled tokens and seconds a run's held-out reward was `bar`, between two evaluations in proportion; those
    of the first evaluation if it was higher then; None if it never was. The seconds of a run are spread over
    its steps as its tokens are."""
    tokens = [float(sum(result.sampled[:step])) for step, _ in result.evaluations]
    points = [(at, reward) for at, (_, reward) in zip(tokens, result.evaluations, strict=True) if reward is not None]
    whole = float(sum(result.sampled))
    if points and points[0][1] >= bar:
        return points[0][0], result.seconds * points[0][0] / whole
    for (first, before), (last, after) in pairwise(points):
        if before < bar <= after:
            at = first + (last - first) * (bar - before) / (after - before)
            return at, result.seconds * at / whole
    return None


def row(name: str, mine: Sequence[Result]) -> str:
    """One arm."""
    taught = [sum(did for did, _ in one.taught) / sum(of for _, of in one.taught) for one in mine]
    cells = [
        VARIANTS[name].says,
        str(len(mine)),
        spread([one.after for one in mine if one.after is not None]),
        spread([float(sum(one.sampled)) for one in mine], 0),
        spread([one.seconds for one in mine], 0),
        spread(taught, 2),
        f"{sum(one.cpu for one in mine) / 3600:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(results: Sequence[Result]) -> str:
    """Both arms, and how much sooner prefixes came to the reward with which the other arm ended."""
    if not results:
        return "nothing was run yet"
    arms = {name: {one.seed: one for one in results if one.variant == name} for name in VARIANTS}
    befores = [one.before for one in results if one.before is not None]
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    lines.append(f"| untrained | {len(befores)} evaluations | {spread(befores)} | | | | |")
    lines += [row(name, [*mine.values()]) for name, mine in arms.items() if mine]
    pairs = [(arms[task].get(one.seed), one) for name, task in BESIDE.items() for one in arms[name].values()]
    lines += ["", f"| {' | '.join(REACHED)} |", "|---" * len(REACHED) + "|"]
    return "\n".join([*lines, *(beside(task, one) for task, one in pairs if task is not None)])


def beside(task: Result, prefix: Result) -> str:
    """When each of two arms came to the lower of their highest held-out rewards, in one seed."""
    curves = [[reward for _, reward in one.evaluations if reward is not None] for one in (task, prefix)]
    bar = min(max(curve) for curve in curves)
    first, second = reached(task, bar), reached(prefix, bar)
    assert first is not None, "each arm came to the lower of both rewards"
    assert second is not None, "each arm came to the lower of both rewards"
    (tokens, seconds), (own, mine) = first, second
    ratios = [f"{one / other:.2f}" if other else "-" for one, other in ((tokens, own), (seconds, mine))]
    cells = [VARIANTS[prefix.variant].says, str(prefix.seed), f"{bar:.2f}", f"{tokens:,.0f}", f"{own:,.0f}", *ratios]
    return f"| {' | '.join([*cells, *(', '.join(f'{reward:.2f}' for reward in curve) for curve in curves)])} |"


def note(results: Sequence[Result], questions: int) -> str:
    """What could make a number worthless."""
    failed, drift = sum(result.failed for result in results), sum(result.drift_tokens for result in results)
    gap = max((result.max_logprob_gap for result in results), default=0.0)
    load = statistics.fmean([result.load for result in results]) if results else 0.0
    return (
        f"Exams of {questions} questions; {', '.join(sorted({str(one.held_out_tasks) for one in results}))} held-out ones. "
        f"Failed rollouts: {failed}; tokens that were not exactly what was sampled: {drift}; largest logprob gap: {gap:.1e} "
        f"nats. Mean load of the machine: {load:.0f}."
    )


def train(given: argparse.Namespace) -> list[str]:
    """Every missing run, seed by seed; what failed, in words. After a failure a new server is started."""
    missing = [
        (seed, name)
        for seed in given.seeds
        for name in given.variants
        if not (given.out / name / f"seed-{seed}.json").is_file()
    ]
    failed, shown = [], demo(given.questions)
    while missing:
        with serving(shown, given, log=given.out / "vllm.log") as url:
            while missing:
                seed, name = missing.pop(0)
                folder = given.out / name / f"seed-{seed}"
                try:
                    result = run(shown, name, VARIANTS[name], seed, url, folder, given)
                except LightningError as error:
                    failed.append(f"{name}, seed {seed}: {error}")
                    tell(f"failed: {failed[-1]}")
                    break
                result.write(folder.with_suffix(".json"))
                tell(f"{name}, seed {seed}: {result.before} -> {result.after} in {result.seconds:.0f} s")
                if not given.keep:
                    shutil.rmtree(folder)
    return failed


def main(given: argparse.Namespace) -> int:
    """Run what is missing, then table everything that is there."""
    failed = train(given)
    results = [Result.read(file) for file in sorted(given.out.glob("*/seed-*.json"))]
    sys.stdout.write(f"{table(results)}\n\n{note(results, given.questions)}\n")
    if given.publish and results:
        on = machine()
        content = {"machine": on, "runs": [asdict(result) for result in results]}
        (ROOT / "docs" / "data" / f"{given.part}.json").write_text(json.dumps(content, indent=1) + "\n")
        where = f"Measured on {on['cores']} cores of {on['cpu']}, Python {on['python']}."
        text = f"{table(results)}\n\n{note(results, given.questions)} {where}"
        replace_table(ROOT / "docs" / "benchmarks.md", given.part, text)
    return bool(failed)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=[TASK, PREFIX, MORE], choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="questions of an exam")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--held-out", type=int, default=48, help="held-out exams of each evaluation")
    parser.add_argument("--eval-every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--train-tasks", type=int, default=TRAIN_TASKS, help="training exams of each run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--out", type=Path, default=Path("bench/prefix"), help="where results are kept")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, too (database, checkpoints)")
    parser.add_argument("--progress", action="store_true", help="show each run's progress")
    parser.add_argument("--part", default="prefix", help="which table of the page to write, and which file of data")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md")
    return parser


if __name__ == "__main__":
    sys.exit(main(arguments().parse_args()))
