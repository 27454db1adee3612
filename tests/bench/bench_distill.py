"""How many rollouts a student needs with a teacher, and how many with rewards alone: the demonstration `tiny`, several seeds.

The teacher is the demonstration's own trained model, of another seed than the students. Students begin with the untrained
model. Each is evaluated on the same held-out tasks after some steps. Printed are these rewards by rollouts, the untrained model
first, and how many rollouts each took to some rewards, the last of which is what reinforcement learning ends with in the same
seed. What the teacher took is not counted: it is there. A run whose result is in the folder is not made again, so the
benchmark may be interrupted.

    python tests/bench/bench_distill.py [--out FOLDER] [--seeds 3] [--steps 15] [--held-out 100]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TEACHER, TEACHER_SEED = "teacher", 100
RL, SMALL, DISTILLED = "reinforcement learning", "reinforcement learning small", "distillation"
EVAL_EVERY = 3
BARS = (0.5, 0.6, 0.7, 0.8)
"""Held-out rewards to reach."""
ROLLOUTS = {TEACHER: (16, 8), RL: (16, 8), SMALL: (4, 8), DISTILLED: (32, 1)}
"""Tasks in a step and rollouts of each: the demonstration's own; a quarter of them, so that there are as many updates for so
many rollouts as with the teacher; and as few without any to compare with."""


def train(arm: str, seed: int, asked: argparse.Namespace, folder: Path) -> None:
    """One run; its result goes to `folder`."""
    from lightning import Distill, Trainer
    from lightning.config import Config, with_settings
    from lightning.plugins import plugins

    demo = plugins().demo("tiny")()
    tasks, size = ROLLOUTS[arm]
    settings = {
        **demo.settings,
        "trainer.seed": seed,
        "trainer.steps": asked.steps,
        "trainer.tasks_per_step": tasks,
        "trainer.eval_every": 0 if arm == TEACHER else EVAL_EVERY,
        "trainer.trackers": (),
    }
    taught = Distill(f"{asked.out / TEACHER / 'run'}@{asked.steps}", group_size=size)
    trainer = Trainer(
        demo.model,
        taught if arm == DISTILLED else demo.algorithm(),
        out=folder / "run",
        config=with_settings(Config(), settings),
        progress=False,
    )
    summary = trainer.fit(demo.agent, demo.tasks(4096, seed), demo.val_tasks(asked.held_out))
    result = {
        "rewards": [[found.step * tasks * size, found.reward] for found in summary.evaluations],
        "seconds": sum(summary.time.values()),
        "failed": summary.failed,
    }
    (folder / "result.json").write_text(json.dumps(result))


def made(arm: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, which is made in a process of its own where it is missing."""
    folder = asked.out / (TEACHER if arm == TEACHER else f"{arm.replace(' ', '-')}-{seed}")
    if not (folder / "result.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        sizes = ["--steps", str(asked.steps), "--held-out", str(asked.held_out)]
        command = [sys.executable, __file__, "--out", str(asked.out), *sizes, "--one", arm, str(seed)]
        with (folder / "log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    say(f"{arm}, seed {seed}: {found}")
    return found


def needed(rewards: list[list[float]], bar: float) -> str:
    """The rollouts up to the first evaluation that is at least as good; a dash where none is."""
    reached = next((int(rollouts) for rollouts, reward in rewards if reward >= bar), None)
    return "-" if reached is None else str(reached)


def table(results: dict[str, list[dict[str, Any]]], teacher: dict[str, Any]) -> str:
    """What came of it."""
    lines = [f"the teacher: {teacher['rewards'][-1][1]:.3f} (untrained {teacher['rewards'][0][1]:.3f})"]
    for arm, found in results.items():
        lines += ["", f"| {arm}: rollouts | mean | by seed |", "|---|---|---|"]
        for place, (rollouts, _) in enumerate(found[0]["rewards"]):
            own = [result["rewards"][place][1] for result in found]
            lines.append(
                f"| {int(rollouts)} | {statistics.fmean(own):.3f} | {' '.join(f'{each:.3f}' for each in own)} |"
            )
    lines += ["", "| rollouts up to | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    last = [result["rewards"][-1][1] for result in results[RL]]
    for bar in (*BARS, None):
        cells = [
            " ".join(needed(own["rewards"], last[seed] if bar is None else bar) for seed, own in enumerate(found))
            for found in results.values()
        ]
        lines.append(f"| {'the end of ' + RL if bar is None else bar} | {' | '.join(cells)} |")
    return "\n".join(lines)


def say(text: str) -> None:
    """A line for who is watching."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/distill"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help="one run alone, in this process")
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    if asked.one:
        arm, seed = asked.one
        train(arm, int(seed), asked, asked.out / (TEACHER if arm == TEACHER else f"{arm.replace(' ', '-')}-{seed}"))
        return
    teacher = made(TEACHER, TEACHER_SEED, asked)
    results: dict[str, list[dict[str, Any]]] = {RL: [], SMALL: [], DISTILLED: []}
    for seed in range(asked.seeds):
        for arm, found in results.items():
            found.append(made(arm, seed, asked))
    say(table(results, teacher))


if __name__ == "__main__":
    main()
