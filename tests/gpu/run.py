"""`make gpu`: what only a GPU can show, in the order of its value, each part's result in a file as soon as it is known.

The invariant: a part that fails, hangs or dies costs the others nothing, and one that has a result for this commit, GPU,
driver and packages is not run again; none is begun without the time that it may take. Nothing but the standard library is
imported, so that any Python can say that there is no GPU.

    python tests/gpu/run.py [--only PART ...] [--again] [--minutes 30] [--out docs/data] [--commit NAME] [--look]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data"
MINUTES = 30.0
GRACE = 10.0
"""Seconds that a part has to end in when it is asked to."""
TAIL = 3000
NO_GPU, NO_NAME = 2, 3
"""Exit codes where nothing was tried: there is no GPU, or no name for the code."""
VERSIONS = ("lightning", "torch", "vllm", "transformers", "verl", "ray")


@dataclass(frozen=True)
class Part:
    """One part: what it shows, the seconds that it may take, and its command, in which {python}, {lightning} and {work} stand
    for this Python, the command beside it and an empty folder. `figures` is the JSON file below {work} that it leaves."""

    name: str
    says: str
    seconds: float
    command: tuple[str, ...]
    figures: str = ""


DEMO = ("{lightning}", "demo")
RUN = ("--held-out", "100", "--no-pages", "--out", "{work}/run")
BF16 = ("--set", "engine.dtype=bfloat16", "--set", "policy_server.dtype=bfloat16")
CUDA = ("--set", "engine.device=cuda", "--set", "policy_server.device=cuda")
PARTS = (
    Part(
        "demo",
        "the demonstration, with vLLM on CUDA and the torch engine on one GPU in bfloat16",
        420,
        (*DEMO, "--steps", "6", *RUN, *BF16, *CUDA),
        "run/report.json",
    ),
    Part(
        "tests",
        "tests/gpu: gradients, FlexAttention, saved states and a shortage of memory",
        240,
        ("{python}", "-m", "pytest", "tests/gpu/test_cuda.py", "-m", "slow", "-q", "-p", "no:cacheprovider"),
    ),
    Part(
        "sleep",
        "vLLM gives the GPU's memory back and takes it again, with the same and with new weights",
        180,
        ("{python}", "-m", "tests.gpu.sleep_and_wake", "{work}/figures.json"),
        "figures.json",
    ),
    Part(
        "tree",
        "seconds of a step by rows, over the tree, and as `auto` chooses",
        240,
        ("{python}", "-m", "tests.gpu.tree_and_rows", "{work}/figures.json"),
        "figures.json",
    ),
    Part(
        "verl",
        "the engine verl with one worker, and vLLM on the rest of the GPU's memory",
        240,
        (*DEMO, "tiny", "--engine", "verl", "--set", "engine.verl.world_size=1", "--steps", "3", *RUN, *CUDA,
         "--set", "policy_server.gpu_memory_utilization=0.4"),
        "run/report.json",
    ),
    Part(
        "long",
        "a row of 64k tokens on verl's worker, and adapters alone in vLLM",
        300,
        ("{python}", "-m", "tests.gpu.verl_rows_and_adapters", "{work}/figures.json"),
        "figures.json",
    ),
    Part(
        "replicas",
        "two vLLMs on one GPU serve one policy: the calls of each, wrong tokens, and the weights of both",
        180,
        ("{python}", "-m", "tests.gpu.two_replicas", "{work}/figures.json"),
        "figures.json",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What a result holds for: the code, the machine and what is installed."""

    commit: str
    gpu: str
    driver: str
    versions: Mapping[str, str | None]


def look_for_gpu() -> tuple[str, str] | str:
    """Name and driver of the first GPU, or why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "nvidia-smi is not installed"
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    name, comma, driver = ran.stdout.partition("\n")[0].partition(",")
    return (name.strip(), driver.strip()) if ran.returncode == 0 and comma else "nvidia-smi finds none"


def current_commit(root: Path = ROOT) -> str:
    """The commit, with a digest of what was changed since; empty without git. Results do not change it."""

    def git(*words: str) -> bytes:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        changed = git("diff", "HEAD", "--", ".", ":(exclude)docs/data")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}+{hashlib.sha256(changed).hexdigest()[:8]}" if changed else commit


def installed_versions() -> dict[str, str | None]:
    """Of what the parts use."""
    from importlib import metadata

    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def run_parts(parts: Sequence[Part], place: Place, out: Path, *, minutes: float = MINUTES, again: bool = False) -> int:
    """Run those without a result, one after the other. The exit code: 0 if all parts have passed, now or before."""
    end, passed = time.monotonic() + 60 * minutes, True
    for part in parts:
        file = out / f"gpu-{part.name}.json"
        known = None if again else earlier_result(file, place)
        if known is None:
            left = end - time.monotonic()
            if left < part.seconds:
                say(
                    f"{part.name}: not begun, it may take {part.seconds:g} s and of {minutes:g} minutes {max(left, 0):.0f} s "
                    "are left; `make gpu` goes on with it"
                )
                passed = False
                continue
            say(f"{part.name}: {part.says} (at most {part.seconds:.0f} s)")
            known = run_part(part, place)
            write(file, known)
        say(f"{part.name}: {known['outcome']} after {known['seconds']} s; {file}")
        passed = passed and known["outcome"] == "passed"
    return 0 if passed else 1


def earlier_result(file: Path, place: Place) -> dict[str, object] | None:
    """What the part had come to in the same place."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(found, dict) and asdict(place).items() <= found.items()
    return found if same and {"outcome", "seconds"} <= found.keys() else None


def run_part(part: Part, place: Place) -> dict[str, object]:
    """One part's result, whatever becomes of it."""
    with tempfile.TemporaryDirectory(prefix=f"gpu-{part.name}-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        beside = Path(sys.executable).parent / "lightning"
        words = {"{python}": sys.executable, "{lightning}": str(beside), "{work}": folder}
        began = time.monotonic()
        with (work / "log").open("wb") as log:
            outcome, code = wait_for([filled(word, words) for word in part.command], part.seconds, log.fileno())
        took = time.monotonic() - began
        figures, missing = read_figures(work / part.figures) if part.figures else (None, "")
        if outcome == "passed" and missing:
            outcome = "failed"
        tail = (work / "log").read_bytes()[-TAIL:].decode(errors="replace")
    return {
        "part": part.name,
        "says": part.says,
        **asdict(place),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 — older Pythons say that there is no GPU
        "command": " ".join(part.command),
        "seconds": round(took, 1),
        "limit": round(part.seconds),
        "outcome": outcome,
        "exit_code": code,
        "figures": figures,
        "error": "" if outcome == "passed" else f"{tail}{missing}",
    }


def filled(word: str, values: Mapping[str, str]) -> str:
    """A word of a command with what its fields stand for."""
    for field, value in values.items():
        word = word.replace(field, value)
    return word


def wait_for(command: Sequence[str], seconds: float, log: int) -> tuple[str, int | None]:
    """Run a command in a process group of its own, of which nothing is left afterwards: its outcome and exit code."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    except OSError as error:
        os.write(log, f"{command[0]} cannot be started: {error}\n".encode())
        return "failed", None
    try:
        code = process.wait(seconds)
        return ("passed" if code == 0 else "failed"), code
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return "timeout", None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_figures(file: Path) -> tuple[object, str]:
    """What a part has measured, and why that is not known."""
    try:
        return json.loads(file.read_text()), ""
    except (OSError, ValueError) as error:
        return None, f"it left no figures: {error}\n"


def write(file: Path, result: Mapping[str, object]) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(file)


def say(line: str) -> None:
    """Progress, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Look for a GPU and run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in parts], help="these parts alone")
    parser.add_argument("--again", action="store_true", help="also those that have a result already")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no part runs longer than this, all counted")
    parser.add_argument("--out", type=Path, default=DATA, help="the folder of the results")
    parser.add_argument("--commit", default="", help="the name of the code, where there is no git")
    parser.add_argument("--look", action="store_true", help="only say whether there is a GPU")
    given = parser.parse_args(arguments)
    gpu = look_for_gpu()
    if isinstance(gpu, str):
        say(f"There is no CUDA GPU on this machine ({gpu}), so there is nothing that `make gpu` could show.")
        return NO_GPU
    if given.look:
        return 0
    commit = given.commit or current_commit()
    if not commit:
        say("This folder has no git history, so name the code that runs: --commit NAME.")
        return NO_NAME
    chosen = [part for part in parts if part.name in (given.only or [each.name for each in parts])]
    place = Place(commit, *gpu, installed_versions())
    return run_parts(chosen, place, given.out, minutes=given.minutes, again=given.again)


if __name__ == "__main__":
    sys.exit(main())
