"""Trains the demonstrations under variants of credit and low level, one run at a time, and tables what they reached.

    python tests/bench/compare/ablate.py [--demos tiny sql] [--variants grpo gigpo ...] [--seeds 0 1 2] [--steps N]

Every run is `lightning.Trainer` on a demonstration's own agent, tasks, model and settings. One vLLM serves all runs of a
demonstration: attached, and given the untrained weights as version 0 before each. A finished run is one JSON file, so that
the same command goes on where it was stopped; a broken one is told and tried again the next time. `--publish` writes the
page.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ablation_table import MISMATCH_METRICS, Result, publish, say
from lightning.config import Config, load_config, with_settings
from lightning.demos import Demo
from lightning.errors import LightningError
from lightning.plugins import plugins
from lightning.policy_server.vllm_server import make_policy_server
from lightning.trainer import Trainer
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import all_rollouts
from repeats import add_arguments
from variants import USUAL, VARIANTS, Variant, build, choose
from watch import Meter

ROOT = Path(__file__).parents[3]
TRAIN_TASKS = 4000


def settings_of(demo: Demo, seed: int, given: argparse.Namespace) -> Config:
    """The demonstration's settings, those of this call, and `--set`."""
    settings: dict[str, object] = {
        **demo.settings,
        "trainer.seed": seed,
        "trainer.eval_every": given.eval_every,
        "trainer.trackers": (),
    }
    if given.steps is not None:
        settings["trainer.steps"] = given.steps
    return load_config(overrides=given.set, base=with_settings(Config(), settings))


@contextmanager
def serving(demo: Demo, given: argparse.Namespace, *, log: Path) -> Iterator[str]:
    """A vLLM with the demonstration's model, for all its runs; gives its URL."""
    os.environ.setdefault("LIGHTNING_VLLM_SECRET", secrets.token_hex(32))  # its runs attach to it
    server = make_policy_server(demo.model, settings_of(demo, 0, given), log=log)
    with asyncio.Runner() as runner:
        try:
            runner.run(server.start())
            yield server.url
        finally:
            runner.run(server.close())


def run(
    demo: Demo, name: str, variant: Variant, seed: int, url: str, folder: Path, given: argparse.Namespace
) -> Result:
    """Train once, from the untrained model, and say what came of it."""
    shutil.rmtree(folder, ignore_errors=True)
    config = with_settings(settings_of(demo, seed, given), {**variant.settings, "policy_server.attach": url})
    algorithm = build(variant, demo)
    trainer = Trainer(
        demo.model, algorithm, train_agents=demo.train_agents, out=folder, config=config, progress=given.progress
    )
    with Meter(os.getpid()) as meter:
        summary = trainer.fit(demo.agent, demo.tasks(given.train_tasks, seed), demo.val_tasks(given.held_out))
    return Result(
        demo=demo.name,
        variant=name,
        says=variant.says,
        seed=seed,
        algorithm=describe_algorithm(algorithm),
        settings=config.model_dump(mode="json"),
        held_out_tasks=given.held_out,
        before=summary.before,
        after=summary.after,
        evaluations=[(result.step, result.reward) for result in summary.evaluations],
        rewards=list(summary.rewards),
        rollouts=summary.rollouts,
        failed=summary.failed,
        drift_tokens=summary.drift_tokens,
        max_logprob_gap=summary.max_logprob_gap or 0.0,
        **asyncio.run(_recorded(trainer)),
        seconds=meter.times[-1] - meter.times[0],
        cpu=meter.cpu[-1] - meter.cpu[0],
        load=os.getloadavg()[0],
    )


async def _recorded(trainer: Trainer) -> dict[str, Any]:
    """How many tool runs of the first step were reported, by status (without any, AIR has nothing to go by), and how far apart
    trainer and sampler were, in the mean over steps; and how many tokens were sampled and groups taught, step by step."""
    store = trainer.open_store()
    await store.open()
    counts: dict[str, int] = {}
    tokens: dict[int, int] = {}
    try:
        for rollout in await all_rollouts(store, trainer.run_id, split="train", step=1):
            for event in list((await store.attempts_of([(rollout.id, rollout.attempt)]))[0].tool_events):
                counts[event.status] = counts.get(event.status, 0) + 1
        steps = [record.metrics for record in await store.steps(trainer.run_id)]
        for step in range(1, len(steps) + 1):
            done = await all_rollouts(store, trainer.run_id, split="train", step=step)
            calls = await store.transitions_of([(rollout.id, rollout.attempt) for rollout in done])
            tokens[step] = sum(len(call.response_ids) for made in calls for call in made)
    finally:
        await store.close()
    found = {name: [step[name] for step in steps if name in step] for name in MISMATCH_METRICS}
    return {
        "tool_events": counts,
        "mismatch": {name: statistics.fmean(values) for name, values in found.items() if values},
        "sampled": list(tokens.values()),
        "taught": [(int(step["groups_used"]), int(step["groups"])) for step in steps],
    }


def tell(text: str) -> None:
    """A line for who is watching."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def run_demo(name: str, chosen: Mapping[str, Variant], given: argparse.Namespace) -> list[str]:
    """Every missing run of one demonstration; what failed, in words. A new server is started after a failure."""
    demo = plugins().demo(name)()
    missing = [
        (seed, variant)
        for seed in given.seeds
        for variant in chosen
        if not (given.out / name / variant / f"seed-{seed}.json").is_file()
    ]
    failed = []
    while missing:
        with serving(demo, given, log=given.out / name / "vllm.log") as url:
            while missing:
                seed, variant = missing.pop(0)
                what = f"{name}, {variant}, seed {seed}"
                folder = given.out / name / variant / f"seed-{seed}"
                tell(f"{what} ...")
                try:
                    result = run(demo, variant, chosen[variant], seed, url, folder, given)
                except LightningError as error:
                    failed.append(f"{what}: {error}")
                    tell(f"{what} failed: {error}")
                    break
                result.write(folder.with_suffix(".json"))
                tell(f"{what}: {result.before} -> {result.after} in {result.seconds:.0f} s, {result.cpu:.0f} CPU-s")
                if not given.keep:
                    shutil.rmtree(folder)
    return failed


def main(given: argparse.Namespace) -> int:
    """Run what is missing, then table everything that is there."""
    chosen = choose(given.variants, given.own)
    for name in given.demos:
        for variant in chosen.values():
            build(variant, plugins().demo(name)())  # a name that nobody registered fails here, before hours of work
    failed = [text for name in given.demos for text in run_demo(name, chosen, given)]
    results = [Result.read(file) for file in sorted(given.out.glob("*/*/seed-*.json"))]
    sys.stdout.write(say(results) + "\n")
    if given.publish and results:
        publish(results, ROOT / "docs", given.part)
    for text in failed:
        tell(f"failed: {text}")
    return bool(failed)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demos", nargs="+", default=["tiny", "sql"], help="demonstrations to train")
    parser.add_argument("--variants", nargs="*", default=list(USUAL), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--own", action="append", default=[], metavar="NAME=ALGORITHM[,KEY=VALUE]...",
                        help="a variant of your own; names are those of plugins")  # fmt: skip
    add_arguments(parser, out="bench/ablation", page="docs/ablation.md", eval_every=0)
    parser.add_argument("--train-tasks", type=int, default=TRAIN_TASKS, help="training tasks of each run")
    parser.add_argument("--part", default="ablation", help="which tables of the page to write, and which file of data")
    parser.add_argument("--progress", action="store_true", help="show each run's progress")
    return parser


if __name__ == "__main__":
    sys.exit(main(arguments().parse_args()))
