"""lightning beside TRL's `GRPOTrainer`: the same model, tasks, seeds, rollouts and rates, to the same held-out reward.

    python tests/bench/compare/compare.py [--demo calculator --dtype bfloat16] [--seeds 0 1 2] [--steps 10]
        [--arms lightning trl]

Each arm runs alone, in a process of its own, and is measured from outside: wall seconds, and the CPU-seconds of its whole
process tree. It writes its weights after each step; all of them are evaluated afterwards, by one script, with the real agent
on a real vLLM. What is finished is kept as JSON, so that the same command goes on where it was stopped; `--publish`
writes the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from evaluate import judging
from lightning.demos import Demo
from lightning.plugins import plugins
from plan import POOL, planned
from setting import Report, Setting
from summary import Point, Run, publish, say
from watch import run_watched

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TRL = ROOT / ".venv-trl"
TRAINED, DONE = "trained.json", "run.json"
"""What a run is kept in: after its training, and after its evaluation."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side: the script that trains, its arguments, and the requirements of its environment (none: ours)."""

    script: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    requirements: str = ""

    def command(self, setting: Path, out: Path, extra: Sequence[str]) -> list[str]:
        """What to start."""
        python = str(TRL / "bin" / "python") if self.requirements else sys.executable
        return [python, str(HERE / self.script), str(setting), str(out), *self.arguments, *extra]


_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ARMS = {
    "lightning": Arm("arm_lightning.py", (), _ONE_THREAD),
    "lightning-2threads": Arm("arm_lightning.py", (), {"OMP_NUM_THREADS": "2"}),
    "lightning-tree": Arm("arm_lightning.py", ("--set", "engine.step=tree"), _ONE_THREAD),
    "lightning-async": Arm("arm_lightning.py", ("--set", "trainer.max_staleness=1"), _ONE_THREAD),
    "trl": Arm("arm_trl.py", ("--threads", "1"), _ONE_THREAD, "trl.txt"),
    "trl-2threads": Arm("arm_trl.py", ("--threads", "2"), {"OMP_NUM_THREADS": "2"}, "trl.txt"),
    "trl-vllm": Arm("arm_trl.py", ("--threads", "1", "--vllm"), _ONE_THREAD | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }, "trl.txt"),
}  # fmt: skip


def setting_of(demo: Demo, seed: int, tool_seconds: float, given: argparse.Namespace) -> Setting:
    """The setting under which a demonstration trains, in words that both sides understand."""
    algorithm = demo.algorithm()
    return Setting(
        demo=demo.name,
        model=str(demo.model),
        dtype=given.dtype,
        seed=seed,
        steps=given.steps,
        group_size=algorithm.group_size,
        lr=cast(float, demo.settings["engine.lr"]),
        warmup_steps=cast(int, demo.settings["engine.warmup_steps"]),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        clip_low=0.2,
        clip_high=0.28,
        tool_seconds=tool_seconds,
        train=planned(demo.tasks(POOL, seed), given.steps, given.tasks_per_step, seed),
    )


def make_environment() -> None:
    """TRL's virtual environment, from the ordinary index; CPU torch from where pip is told to look for it."""
    ready = TRL / ".ready"
    wanted = (HERE / "trl.txt").read_text()
    if ready.is_file() and ready.read_text() == wanted:
        return
    uv = Path(sys.executable).with_name("uv")
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    torch = [part for folder in folders for part in ("--find-links", folder)] or ["--torch-backend", "cpu"]
    python = TRL / "bin" / "python"
    if not python.exists():
        subprocess.run([uv, "venv", "--python", sys.executable, TRL], check=True)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *torch]
    overrides = ["--overrides", str(HERE / "trl-overrides.txt")]
    subprocess.run([*install, *overrides, "-r", HERE / "trl.txt", "-e", ".[openai,autogen]"], check=True, cwd=ROOT)
    ready.write_text(wanted)


def measure(name: str, setting: Setting, folder: Path, extra: Sequence[str]) -> Run:
    """Train once, from nothing, and return the run with its stages, not evaluated yet."""
    arm = ARMS[name]
    shutil.rmtree(folder, ignore_errors=True)
    file = folder / "setting.json"
    setting.write(file)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **arm.environment}
    meter, began = run_watched(arm.command(file, folder, extra), env=env, log=folder / "log.txt")
    report = Report.read(folder / "report.json")
    return Run(
        arm=name,
        seed=setting.seed,
        setting=setting.described(),
        versions=report.versions,
        start_seconds=report.ready - began,
        start_cpu=meter.at(report.ready),
        total_seconds=meter.times[-1] - began,
        total_cpu=meter.cpu[-1],
        load=os.getloadavg()[0],
        points=[
            Point(step.step, step.at - began, meter.at(step.at), step.reward, None, step.weights)
            for step in report.steps
        ],
    )


def judge_all(demo: Demo, out: Path, every: int, held_out: int) -> None:
    """Evaluate every run that was trained and not evaluated yet: every so many steps, the last one, and the untrained model."""
    waiting = [
        folder.parent for folder in sorted(out.glob(f"*/*/seed-*/{TRAINED}")) if not (folder.parent / DONE).is_file()
    ]
    if not waiting:
        return
    base = out / f"base-{held_out}.json"
    with judging(demo, held_out, log=out / "evaluation.log") as judge:
        if not base.is_file():
            base.write_text(json.dumps(judge(demo.model / "model.safetensors")) + "\n")
        for folder in waiting:
            run = Run.read(folder / TRAINED)
            tell(f"evaluating {run.arm}, seed {run.seed} ...")
            last = run.points[-1].step
            chosen = [point for point in run.points if point.step % every == 0 or point.step == last]
            rewards = {point.step: judge(Path(point.weights)) for point in chosen}
            run.with_held_out(json.loads(base.read_text()), rewards).write(folder / DONE)


def tell(text: str) -> None:
    """A line for who is watching."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train_all(demo: Demo, given: argparse.Namespace) -> list[str]:
    """Train what was not trained yet, one run at a time; what failed, in words."""
    failed = []
    for seed, tool_seconds, name in itertools.product(given.seeds, given.tool_seconds, given.arms):
        folder = given.out / f"tools-{tool_seconds:g}s" / name / f"seed-{seed}"
        if (folder / TRAINED).is_file():
            continue
        what = f"{name}, tools of {tool_seconds:g} s, seed {seed}"
        tell(f"training {what} ...")
        extra = ["--rows", str(given.trl_rows)]
        if name.startswith("lightning"):
            extra = [part for item in given.set for part in ("--set", item)]
        try:
            run = measure(name, setting_of(demo, seed, tool_seconds, given), folder, extra)
        except RuntimeError as error:
            failed.append(f"{what}: {error}")
            continue
        run.write(folder / TRAINED)
    return failed


def main(given: argparse.Namespace) -> int:
    """Run what is missing, then say what was seen."""
    given.out = given.out or Path("bench") / ("compare" if given.demo == "tiny" else f"compare-{given.demo}")
    given.out.mkdir(parents=True, exist_ok=True)
    demo = plugins().demo(given.demo)()
    if any(ARMS[name].requirements for name in given.arms):
        make_environment()
    failed = train_all(demo, given)
    judge_all(demo, given.out, given.eval_every, given.held_out)
    runs = [Run.read(file) for file in sorted(given.out.glob(f"*/*/seed-*/{DONE}"))]
    tell(say(runs))
    if given.publish and runs:
        publish(runs, ROOT / "docs", "comparison" if given.demo == "tiny" else f"comparison-{given.demo}")
    for text in failed:
        tell(f"failed: {text}")
    return bool(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=["lightning", "trl"], metavar="ARM",
                        help=f"what to run: {', '.join(ARMS)}")  # fmt: skip
    parser.add_argument("--demo", choices=["tiny", "calculator"], default="tiny", help="whose agent, tasks and model")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="what both sides compute in"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps")
    parser.add_argument("--tasks-per-step", type=int, default=16, help="tasks of a step, 8 rollouts each")
    parser.add_argument("--tool-seconds", nargs="+", type=float, default=[0.0, 0.05, 0.15], metavar="S",
                        help="how long every tool waits; each is a table of its own")  # fmt: skip
    parser.add_argument("--eval-every", type=int, default=1, help="evaluate the weights of every so many steps")
    parser.add_argument("--held-out", type=int, default=200, help="held-out tasks")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of lightning's")
    parser.add_argument(
        "--trl-rows", type=int, default=0, help="rollouts in a forward and backward pass of TRL; 0: all of a step"
    )
    parser.add_argument("--out", type=Path, help="where runs are kept; default: bench/compare, or bench/compare-DEMO")
    parser.add_argument("--publish", action="store_true", help="write docs/comparison.md and its picture")
    sys.exit(main(parser.parse_args()))
