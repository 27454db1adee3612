"""Credits on a long task with a real model: what each learned of `lightning demo quest` from as many sampled tokens.

    python tests/bench/compare/quest.py [--variants identical gigpo] [--seeds 0 1 2] [--steps N] [--publish]

Every run is the demonstration's own agent, tasks, model and settings; the variants differ in their credit alone. One vLLM
serves all runs: it is given the untrained weights before each. A finished run is one JSON file, so the same command goes on
where it was stopped. Others may use the machine meanwhile: rewards are compared at sampled tokens, not at seconds. `--publish`
writes the table of docs/benchmarks.md and docs/data/quest.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ablate import TRAIN_TASKS, run, serving, tell
from ablation_table import Result
from lightning.demos import Demo
from lightning.errors import ConfigError, LightningError
from lightning.plugins import plugins
from page import replace_table
from repeats import against, spread
from summary import machine
from variants import Variant, build

ROOT = Path(__file__).parents[3]
BASE = "identical"
_DEMO = {"entropy_coefficient": 0.02}
"""What the demonstration's own algorithm has besides."""
VARIANTS: Mapping[str, Variant] = {
    BASE: Variant("grpo", {**_DEMO, "credit": "identical"}, "`identical`: the rollout's advantage (the demonstration's)"),
    "gigpo": Variant("grpo", {**_DEMO, "credit": "gigpo"}, "`gigpo`: and that among calls in the same state"),
    "leave-one-out": Variant("grpo", {**_DEMO, "credit": "leave-one-out"}, "`leave-one-out`: against others in the same state"),
    # Its advantages are in units of the reward, and divided among continuations: beside them the demonstration's bonus is many
    # times as strong as beside GRPO's, and made the policy answer at random within six steps.
    "branch": Variant(
        "grpo", {"entropy_coefficient": 0.0, "credit": "branch"},
        "`branch`: against what comes of branches; no entropy bonus", {"trainer.sampling": "tree"},
    ),
    "branch-entropy": Variant(
        "grpo", {"entropy_coefficient": 0.0, "credit": "branch"},
        "`branch`, first at the answers to tool results that were least likely",
        {"trainer.sampling": "tree", "trainer.branch_by": "entropy"},
    ),
}  # fmt: skip
USUAL = (BASE, "gigpo", "branch")
"""The variants that run where none are named."""


def curve(results: Sequence[Result]) -> str:
    """The held-out reward of one variant after each of its evaluations, in the mean over seeds."""
    steps = sorted({step for result in results for step, _ in result.evaluations})
    rows = [[reward for result in results for at, reward in result.evaluations if at == step] for step in steps]
    means = [[reward for reward in row if reward is not None] for row in rows]
    return ", ".join(f"{step}: {sum(row) / len(row):.2f}" for step, row in zip(steps, means, strict=True) if row)


def table(results: Sequence[Result]) -> str:
    """Each variant when as many tokens had been sampled as in the run that sampled the fewest; the untrained policy first."""
    if not results:
        return "nothing was run yet"
    tokens = min(sum(result.sampled) for result in results)
    reached = {
        name: {one.seed: found for one in results if one.variant == name
               if (found := one.held_out_at(tokens)) is not None}
        for name in VARIANTS
    }  # fmt: skip
    befores = [result.before for result in results if result.before is not None]
    heads = ["credit", "seeds", f"held-out reward at {tokens:,} sampled tokens", f"against `{BASE}`, same seeds"]
    lines = [
        f"| {' | '.join([*heads, 'after each step (mean)'])} |",
        "|---" * (len(heads) + 1) + "|",
        f"| untrained | {len(befores)} evaluations | {spread(befores)} | | |",
    ]
    for name, variant in VARIANTS.items():
        if mine := reached[name]:
            ours = [result for result in results if result.variant == name]
            gap = "" if name == BASE else against(mine, reached[BASE])
            lines.append(f"| {variant.says} | {len(mine)} | {spread([*mine.values()])} | {gap} | {curve(ours)} |")
    return "\n".join(lines)


def note(results: Sequence[Result]) -> str:
    """What could make a number worthless."""
    failed, drift = sum(result.failed for result in results), sum(result.drift_tokens for result in results)
    gap = max((result.max_logprob_gap for result in results), default=0.0)
    held_out = sorted({result.held_out_tasks for result in results})
    return (
        f"{' or '.join(map(str, held_out))} held-out tasks. Failed rollouts: {failed}; tokens that were not exactly what was "
        f"sampled: {drift}; largest logprob gap: {gap:.1e} nats."
    )


def read(out: Path) -> list[Result]:
    """All finished runs. Raises `ConfigError` where they differ in more than their variant and seed."""
    found = {file: Result.read(file) for file in sorted(out.glob("*/seed-*.json"))}
    for file, result in found.items():
        if _alike(result) != _alike(next(iter(found.values()))):
            raise ConfigError(f"{file} is of a run with other settings than {next(iter(found))}: give another --out")
    return [*found.values()]


def _alike(result: Result) -> object:
    """What all runs of a table have in common."""
    own = {key for variant in VARIANTS.values() for key in variant.settings} | {"trainer.seed"}
    kept = {
        f"{section}.{key}": value
        for section in ("trainer", "engine")
        for key, value in dict(result.settings[section]).items()  # type: ignore[call-overload]
    }
    return result.held_out_tasks, {key: value for key, value in kept.items() if key not in own}


def train(demo: Demo, given: argparse.Namespace) -> list[str]:
    """Every missing run, seed by seed; what failed, in words. After a failure a new server is started."""
    missing = [
        (seed, name)
        for seed in given.seeds
        for name in given.variants
        if not (given.out / name / f"seed-{seed}.json").is_file()
    ]
    failed = []
    while missing:
        with serving(demo, given, log=given.out / "vllm.log") as url:
            while missing:
                seed, name = missing.pop(0)
                folder = given.out / name / f"seed-{seed}"
                tell(f"{name}, seed {seed} ...")
                try:
                    result = run(demo, name, VARIANTS[name], seed, url, folder, given)
                except LightningError as error:
                    failed.append(f"{name}, seed {seed}: {error}")
                    tell(f"failed: {failed[-1]}")
                    break
                result.write(folder.with_suffix(".json"))
                tell(f"{name}, seed {seed}: {result.before} -> {result.after} in {result.seconds:.0f} s")
                if not given.keep:
                    shutil.rmtree(folder)
    return failed


def publish(results: Sequence[Result], docs: Path) -> None:
    """Write the data, and the table from it."""
    on = machine()
    content = {"machine": on, "runs": [asdict(result) for result in results]}
    (docs / "data" / "quest.json").write_text(json.dumps(content, indent=1) + "\n")
    where = f"Measured on {on['cores']} cores of {on['cpu']}, Python {on['python']}."
    replace_table(docs / "benchmarks.md", "quest", f"{table(results)}\n\n{note(results)} {where}")


def main(given: argparse.Namespace) -> int:
    """Run what is missing, then table everything that is there."""
    demo = plugins().demo("quest")()
    for name in given.variants:
        build(VARIANTS[name], demo)  # a credit that nobody registered fails here, before hours of work
    failed = train(demo, given)
    results = read(given.out)
    sys.stdout.write(f"{table(results)}\n\n{note(results)}\n")
    if given.publish and results:
        publish(results, ROOT / "docs")
    return bool(failed)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants", nargs="+", default=list(USUAL), choices=list(VARIANTS), help="credits to train with"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the demonstration's own number")
    parser.add_argument("--held-out", type=int, default=100, help="held-out tasks of each evaluation")
    parser.add_argument("--eval-every", type=int, default=3, help="steps between evaluations")
    parser.add_argument("--train-tasks", type=int, default=TRAIN_TASKS, help="training tasks of each run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--out", type=Path, default=Path("bench/quest"), help="where results are kept")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, too (database, checkpoints)")
    parser.add_argument("--progress", action="store_true", help="show each run's progress")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md")
    return parser


if __name__ == "__main__":
    sys.exit(main(arguments().parse_args()))
