"""The queue of a sweep: runs as processes, so many at a time, each with cores and GPUs of its own.

A run is done when it has a `report.json`. One that has a database and no report goes on (`--resume`). `sweep.json` in a run's
folder has the arguments it was begun with: with others its numbers would be those of two different runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning.cli.check import ProbeError, list_gpus
from lightning.errors import ConfigError
from lightning.store.places import store_in

from lightning_deploy.sweep_file import PlannedRun

LOOK_SECONDS = 0.2
END_SECONDS = 60.0
"""How long a run that is stopped may take to write what it has."""
REPORT, BEGUN, LOG, LOCK = "report.json", "sweep.json", "train.log", "sweep.lock"


@dataclass(frozen=True, slots=True)
class Slot:
    """What one run at a time has of the machine. `gpus` as in CUDA_VISIBLE_DEVICES; empty: none are assigned."""

    cores: int
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run of the sweep. `report` is that of `lightning train`; without one, `why` says what happened."""

    run: PlannedRun
    report: dict[str, Any] | None
    why: str = ""


@dataclass(slots=True)
class _Working:
    run: PlannedRun
    slot: Slot
    process: subprocess.Popen[bytes]
    log: TextIO
    began: float


def slots(at_once: int, gpus_each: int) -> list[Slot]:
    """The machine cut into `at_once` parts; 0: as many as its GPUs are enough for, and one where there are none."""
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
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
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
    """Hold a sweep's folder. Raises `ConfigError` while another process does."""
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
    """What a run wrote at its end; None where it has not come to it, or was killed while it wrote."""
    try:
        found: dict[str, Any] = json.loads((folder / run.name / REPORT).read_text())
    except (OSError, ValueError):
        return None
    return found


def work(runs: Sequence[PlannedRun], folder: Path, places: Sequence[Slot], told: Callable[[str], None]) -> list[Ended]:
    """Run what is not done yet; returns all runs, in the order of the file. A run that fails does not stop the others.

    On an interruption the runs that go on are told to stop, and may save what they have.
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
                one.log.close()
                if why := _why(one, folder):
                    failed[one.run.name] = why
                told(f"{one.run.name} {why or 'is done'} after {time.monotonic() - one.began:.0f} s")
            time.sleep(LOOK_SECONDS)
    finally:
        _stop(working)
    return [Ended(run, _report(folder, run), failed.get(run.name, "")) for run in runs]


def _start(run: PlannedRun, folder: Path, slot: Slot) -> _Working:
    own = folder / run.name
    own.mkdir(parents=True, exist_ok=True)
    (own / BEGUN).write_text(_begun(run))
    command = [sys.executable, "-m", "lightning", "train", *run.arguments, "--out", str(own)]
    command += ["--resume"] if store_in(own) else []
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(slot.cores))}
    env |= {"CUDA_VISIBLE_DEVICES": slot.gpus} if slot.gpus else {}
    log = (own / LOG).open("a", encoding="utf-8")
    # A group of its own: Ctrl-C reaches the sweep alone, which then stops its runs.
    process = subprocess.Popen(  # noqa: S603 — ourselves, without a shell
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
    )
    return _Working(run, slot, process, log, time.monotonic())


def _why(one: _Working, folder: Path) -> str:
    """What went wrong; empty for a run that is done."""
    if one.process.returncode == 0 and _report(folder, one.run) is not None:
        return ""
    said = (folder / one.run.name / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"failed with exit code {one.process.returncode}: {said[-1].strip()[:300] if said else 'it said nothing'}"


def _stop(working: Sequence[_Working]) -> None:
    for one in working:
        one.process.send_signal(signal.SIGTERM)  # as Ctrl-C to a training, and heard below nohup, too
    deadline = time.monotonic() + END_SECONDS
    for one in working:
        try:
            one.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C waits no longer
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
        one.log.close()
