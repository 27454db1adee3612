"""`lightning sweep`: repeats a training with several seeds and settings, and compares the results. Its file describes the runs,
each as the arguments of one `lightning train`:

train = "my_agent:solve --model models/tiny --tasks train.jsonl --val val.jsonl"
seeds = [0, 1, 2]

[settings]                      # every combination of these
"engine.lr" = [1e-6, 5e-6]

[variants]                      # and of each of these; more arguments of `lightning train`
grpo = "--algorithm grpo"
ppo = "--algorithm ppo --set engine.critic_lr=1e-4"

Its queue runs several processes at a time, each with cores and GPUs of its own. A run is done when it has a `report.json`. One
with a database and no report is resumed (`--resume`). `sweep.json` in a run's folder has the arguments it was begun with: with
other arguments its numbers would be a mixture of two runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from lightning.cli.check import ProbeError
from lightning.cli.output import AsJson, escape, next_steps, print_json, print_table, say, stoppable
from lightning.errors import ConfigError
from lightning.safe_text import read_text
from lightning.store.places import store_in
from lightning_verl.gpus import list_gpus

from lightning_deploy.processes import Process, end, start

KEYS = frozenset({"train", "seeds", "settings", "variants"})
OURS = ("--out", "--resume", "--dev", "-h", "--help")
"""Arguments of `lightning train` that a sweep sets itself, or that begin no run."""
MOST_RUNS = 1000


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep. Runs of one `variant` differ only in their seed; `name` is the run's folder below the sweep's
    folder."""

    name: str
    variant: str
    seed: int
    arguments: tuple[str, ...]


def read_sweep(file: Path) -> list[PlannedRun]:
    """Read the runs of a file, ordered by seed, so that a sweep that is stopped early has compared all variants. Raises
    `ConfigError`."""
    try:
        content = tomllib.loads(read_text(file, ConfigError))
    except OSError as error:
        raise ConfigError(f"cannot read the sweep: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    unknown = sorted(set(content) - KEYS)
    if unknown:
        raise ConfigError(f"{file} has {', '.join(unknown)}: a sweep knows {', '.join(sorted(KEYS))}")
    train = _arguments(file, "train", content.get("train"))
    seeds = content.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise ConfigError(f"{file}: seeds is a list of whole numbers, such as [0, 1, 2]")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"{file}: a seed is there twice")
    variants = _variants(file, content)
    runs = [
        PlannedRun(f"{name}-seed{seed}", name, seed, (*train, *more, "--set", f"trainer.seed={seed}"))
        for seed in seeds
        for name, more in variants.items()
    ]
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{file} asks for {len(runs)} runs, more than {MOST_RUNS}: split it")
    return runs


def _arguments(file: Path, key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            found = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"{file}: {key} cannot be cut into arguments: {error}") from error
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        found = value
    else:
        raise ConfigError(f"{file}: {key} has the arguments of `lightning train`, as one text or a list of texts")
    if key == "train" and found[:2] == ["lightning", "train"]:
        found = found[2:]
    for argument in found:
        if argument.partition("=")[0] in OURS:
            raise ConfigError(
                f"{file}: {key} has {argument}, which is not for a sweep: it gives each run its own folder"
            )
        if argument.startswith("trainer.seed="):
            raise ConfigError(f"{file}: {key} sets trainer.seed: seeds = [...] does")
    return tuple(found)


def _variants(file: Path, content: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the names and arguments of all combinations of variants and settings."""
    settings, named = content.get("settings", {}), content.get("variants", {})
    if not isinstance(settings, dict) or not isinstance(named, dict):
        raise ConfigError(f"{file}: settings and variants are tables")
    choices: list[Sequence[tuple[str, tuple[str, ...]]]] = []
    if named:
        choices.append([(_word(name), _arguments(file, f"variants.{name}", value)) for name, value in named.items()])
    for key, values in settings.items():
        if isinstance(values, dict):
            raise ConfigError(f'{file}: write "{key}.{next(iter(values), "")}" = [...] in quotes, below [settings]')
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{file}: settings.{key} is a list of values to try")
        choices.append(
            [(f"{key.rpartition('.')[2]}={_word(value)}", ("--set", f"{key}={_value(value)}")) for value in values]
        )
    found: dict[str, tuple[str, ...]] = {}
    for combination in itertools.product(*choices):
        name = "-".join(name for name, _ in combination) or "run"
        if name in found:
            raise ConfigError(f"{file}: two variants are called {name}: give them other names or values")
        found[name] = tuple(argument for _, arguments in combination for argument in arguments)
    return found


def _value(value: object) -> str:
    """Return a value as `--set` takes it: a text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _word(value: object) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", _value(value)).strip("_")[:60] or "empty"


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: train, seeds, settings, variants.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the runs; default: runs/ and the file's name.")
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(help="Number of runs at the same time; 0: as many as --gpus allows, and one without GPUs.", min=0),
    ] = 0,
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs of each run (CUDA_VISIBLE_DEVICES); 0 assigns none.", min=0)
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs, and begin none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train with several seeds and settings, and compare. The same command goes on where it was stopped."""
    runs, folder = read_sweep(file), out or Path("runs") / file.stem
    if dry_run:
        if as_json:
            print_json(runs)
        else:
            print_table(
                ("run", "lightning train"), [(escape(run.name), escape(" ".join(run.arguments))) for run in runs]
            )
        return
    places = slots(at_once, gpus)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its runs would go on without it
    with alone(folder), stoppable("the same command"):
        check_begun(runs, folder)
        ended = work(runs, folder, places, lambda text: None if as_json else say(escape(text)))
    rows = [summed(variant, ended) for variant in dict.fromkeys(run.variant for run in runs)]
    if as_json:
        print_json({"folder": str(folder), "variants": rows, "runs": ended})
    else:
        _show(rows, folder)
    if any(one.report is None for one in ended):
        raise typer.Exit(1)


def summed(variant: str, ended: Sequence[Ended]) -> dict[str, object]:
    """Summarize the runs of a variant. `before` and `after` are mean held-out rewards in which a failed rollout counts as 0.
    `spread` is the standard deviation of `after` over seeds, None for fewer than two."""
    own = [one for one in ended if one.run.variant == variant]
    done = [one.report for one in own if one.report is not None]
    before, after = ([_held_out(report, place) for report in done] for place in (0, -1))
    known = [value for value in after if value is not None]
    first = [value for value in before if value is not None]
    return {
        "variant": variant,
        "done": len(done),
        "failed": [f"{one.run.name} {one.why}" for one in own if one.report is None],
        "before": statistics.fmean(first) if first else None,
        "after": statistics.fmean(known) if known else None,
        "spread": statistics.stdev(known) if len(known) > 1 else None,
        "least": min(known, default=None),
        "most": max(known, default=None),
        "failed_rollouts": sum(report["failed"] for report in done),
    }


def _held_out(report: dict[str, object], place: int) -> float | None:
    evaluations = report["evaluations"]
    assert isinstance(evaluations, list)
    return evaluations[place]["reward_with_failures"] if evaluations else None


def _show(rows: Sequence[dict[str, object]], folder: Path) -> None:
    def number(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else "-"

    print_table(
        ("variant", "seeds", "held-out before", "after", "± over seeds", "least", "most", "failed rollouts"),
        [
            (
                escape(str(row["variant"])),
                str(row["done"]),
                *(number(row[key]) for key in ("before", "after", "spread", "least", "most")),
                str(row["failed_rollouts"]),
            )
            for row in sorted(rows, key=lambda row: -(row["after"] if isinstance(row["after"], float) else -1.0))
        ],
    )
    for row in rows:
        assert isinstance(row["failed"], list)
        for text in row["failed"]:
            say(escape(f"not counted: {text}"))
    say("Held-out rewards count a failed rollout as 0.")
    next_steps(
        ("compare the runs", ["runs", "compare", "--runs", folder]),
        ("compare their curves, in a browser", ["console", folder]),
    )


LOOK_SECONDS = 0.2
REPORT, BEGUN, LOG, LOCK = "report.json", "sweep.json", "train.log", "sweep.lock"


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of the machine for one run at a time. `gpus` is as in CUDA_VISIBLE_DEVICES; empty: none are assigned."""

    cores: int
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run of the sweep that has ended. `report` is that of `lightning train`; None where it failed, and `why` says how."""

    run: PlannedRun
    report: dict[str, Any] | None
    why: str = ""


@dataclass(slots=True)
class _Working:
    run: PlannedRun
    slot: Slot
    process: Process
    began: float


def slots(at_once: int, gpus_each: int) -> list[Slot]:
    """Divide the machine into `at_once` parts; 0: as many as its GPUs allow, or one without GPUs. Raises `ConfigError` for too
    few GPUs."""
    cores, gpus = len(os.sched_getaffinity(0)), _gpus() if gpus_each else []
    if gpus_each > len(gpus):
        raise ConfigError(f"each run is to have {gpus_each} GPUs, and there are {len(gpus)}: give a smaller --gpus")
    if not at_once:
        at_once = len(gpus) // gpus_each if gpus_each else 1
    if gpus_each and at_once * gpus_each > len(gpus):
        raise ConfigError(f"{at_once} runs with {gpus_each} GPUs each need more than the {len(gpus)} that are there")
    own = [",".join(gpus[place * gpus_each : (place + 1) * gpus_each]) for place in range(at_once)]
    return [Slot(max(1, cores // at_once), part) for part in own]


def _gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    try:
        return [str(number) for number in range(len(list_gpus()))]
    except ProbeError as error:
        raise ConfigError(
            f"GPUs cannot be counted, because nvidia-smi fails ({error}): set CUDA_VISIBLE_DEVICES"
        ) from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a sweep's folder for the block. Raises `ConfigError` while another process has the lock."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another `lightning sweep` works in {folder}: wait for it, or give another --out"
            ) from error
        yield


def check_begun(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Raise `ConfigError` for a run that was begun with other arguments."""
    for run in runs:
        file = folder / run.name / BEGUN
        if file.exists() and file.read_text() != _begun(run):
            raise ConfigError(
                f"{folder / run.name} was begun with other arguments ({file}): remove that folder to run it again, or give "
                "another --out"
            )


def _begun(run: PlannedRun) -> str:
    return json.dumps(list(run.arguments)) + "\n"


def _report(folder: Path, run: PlannedRun) -> dict[str, Any] | None:
    """Return the report that a run wrote at its end; None where it has not ended, or was killed while it wrote."""
    return read_json(folder / run.name / REPORT)


def read_json(file: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None where the file does not exist or has something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def work(runs: Sequence[PlannedRun], folder: Path, places: Sequence[Slot], told: Callable[[str], None]) -> list[Ended]:
    """Run the runs that are not done, and return all in the order of the file. A run that fails does not stop the others.

    On an interruption the running ones are told to stop, and may save their work.
    """
    waiting = [run for run in runs if _report(folder, run) is None]
    if len(waiting) < len(runs):
        told(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    free, working, failed = list(places), list[_Working](), dict[str, str]()
    try:
        while waiting or working:
            while waiting and free:
                working.append(_start(waiting.pop(0), folder, free.pop(0)))
                told(f"{working[-1].run.name} begins; its output goes to {folder / working[-1].run.name / LOG}")
            for one in [one for one in working if one.process.poll() is not None]:
                working.remove(one)
                free.append(one.slot)
                if why := _why(one, folder):
                    failed[one.run.name] = why
                told(f"{one.run.name} {why or 'is done'} after {time.monotonic() - one.began:.0f} s")
            time.sleep(LOOK_SECONDS)
    finally:
        end([one.process for one in working])
    return [Ended(run, _report(folder, run), failed.get(run.name, "")) for run in runs]


def _start(run: PlannedRun, folder: Path, slot: Slot) -> _Working:
    own = folder / run.name
    own.mkdir(parents=True, exist_ok=True)
    (own / BEGUN).write_text(_begun(run))
    command = [sys.executable, "-m", "lightning", "train", *run.arguments, "--out", str(own)]
    command += ["--resume"] if store_in(own) else []
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(slot.cores))}
    env |= {"CUDA_VISIBLE_DEVICES": slot.gpus} if slot.gpus else {}
    return _Working(run, slot, start(command, own / LOG, env), time.monotonic())


def _why(one: _Working, folder: Path) -> str:
    """Return what went wrong with an ended run; empty for one that is done."""
    if one.process.returncode == 0 and _report(folder, one.run) is not None:
        return ""
    said = (folder / one.run.name / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"failed with exit code {one.process.returncode}: {said[-1].strip()[:300] if said else 'it said nothing'}"
