"""The console's list of runs, with 200 runs of 10,000 rollouts: ours beside reading all of each run, which is the naive way.

Both as people have them: all runs in one database, and each in a folder of its own. Printed are seconds of the first look, of
later ones, of one after a run has gone on, and of the naive way; then CPU seconds of a minute's worth of refreshes.

    python tests/bench/bench_console.py [--runs 200] [--rollouts 10000] [--steps 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lightning.config import Config
from lightning.plugins import plugins
from lightning.store.pages import each_rollout
from lightning.store.url import sqlite_url
from lightning.trainer.context import mark_over
from lightning.types import Json, Run
from lightning_console.places import Places
from lightning_console.router import show

METRICS = {
    f"{name}": 0.1
    for name in (
        *(
            "entropy",
            "clip_fraction",
            "dual_clip_fraction",
            "masked_share",
            "approx_kl",
            "ratio",
            "ess",
            "loss",
            "grad_norm",
        ),
        *(
            "max_logprob_gap",
            "mean_logprob_gap",
            "p999_logprob_gap",
            "lr",
            "stepped",
            "rows",
            "calls_per_rollout",
            "truncated",
        ),
        *("staleness_mean", "staleness_max", "prefix_hit_share", "preemptions", "drift_tokens", "tokens_per_second"),
    )
}


async def fill(path: Path, names: list[str], rollouts: int, steps: int) -> None:
    """Runs that have ended, a fiftieth of their rollouts held out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    store = plugins().store(sqlite_url(path))
    await store.open()
    tasks = {"train": [f"task-{n:016x}" for n in range(1000)], "val": [f"task-{n:016x}" for n in range(200)]}
    config: dict[str, Json] = {
        "model": "m",
        "seed": 0,
        "tasks": tasks,
        "config": Config().model_dump(mode="json"),
        "algorithm": None,
    }
    for name in names:
        await store.put_run(Run(name, name, config, 1.7e9 + len(name)))
        await mark_over(store, name, True)
    await store.close()
    size = max(1, rollouts // steps)
    with sqlite3.connect(path) as database:
        for name in names:
            database.executemany(
                "INSERT INTO rollouts (id, run, task, group_id, step, split, idx, max_attempts, status, attempt, reward, "
                "resources, parent) VALUES (?, ?, ?, ?, ?, ?, 0, 2, 'succeeded', 1, ?, '{}', '')",
                (
                    (
                        *(f"{name}/{n}", name, json.dumps([f"t{n}", "What is 1 + 1? " * 8, 2, {}]), f"{name}/{n // 8}"),
                        *(
                            n // size // 5 * 5 if n % 50 == 0 else n // size,
                            "val" if n % 50 == 0 else "train",
                            n % 7 / 7,
                        ),
                    )
                    for n in range(rollouts)
                ),
            )
            pairs, digests = json.dumps([[f"{name}/{n}", 1] for n in range(size)]), json.dumps(["d" * 64] * size)
            database.executemany(
                "INSERT INTO steps (run, step, policy_version, rollouts, digests, digest, checkpoint, metrics, group_ids, "
                "context, at, policy) VALUES (?, ?, ?, ?, ?, ?, '', ?, '[]', '{}', ?, 'policy')",
                (
                    (
                        *(name, step, step, pairs, digests, "e" * 64),
                        *(
                            json.dumps(METRICS | {"reward": step / steps, "rollouts": size, "failed": 0.0}),
                            1.7e9 + step,
                        ),
                    )
                    for step in range(1, steps + 1)
                ),
            )


async def naive(places: Places) -> int:
    """Everything of each run, as a first version would read it."""
    seen = 0
    for store in (await places.stores()).values():
        for run in await store.list_runs():
            states = Counter([rollout.status async for rollout in each_rollout(store, run.id)])
            steps, metrics = await store.steps(run.id), await store.metrics(run.id)
            seen += sum(states.values()) + len(steps) + len(metrics)
    return seen


async def timed(ask: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await ask()
    return time.perf_counter() - began


async def measure(where: Path, changed: Path) -> dict[str, float]:
    """How long the page takes."""
    places = Places(str(where))
    found = {"first look": await timed(lambda: show(places, "runs"))}
    found["again"] = min([await timed(lambda: show(places, "runs")) for _ in range(3)])
    found["again, another order"] = await timed(lambda: show(places, "runs?sort=-reward&q=run"))
    with sqlite3.connect(changed) as database:
        database.execute("UPDATE state SET value = 'false' WHERE name = 'over' AND run LIKE '%-0'")
    found["after a run has gone on"] = await timed(lambda: show(places, "runs"))
    began = time.process_time()
    for _ in range(10):
        await show(places, "runs")
    found["CPU of a look"] = (time.process_time() - began) / 10
    found["naive"] = await timed(lambda: naive(places))
    await places.close()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    names = [f"run-{n}" for n in range(asked.runs)]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one" / "lightning.db", Path(folder) / "many"
        asyncio.run(fill(one, names, asked.rollouts, asked.steps))
        for name in names:
            asyncio.run(fill(many / name / "lightning.db", [name], asked.rollouts, asked.steps))
        results["one database"] = asyncio.run(measure(one, one))
        results["a folder each"] = asyncio.run(measure(many, many / "run-0" / "lightning.db"))
    for what, found in results.items():
        sys.stdout.write(f"{asked.runs} runs of {asked.rollouts} rollouts, {what}\n")
        sys.stdout.writelines(f"  {name:26} {value:8.3f} s\n" for name, value in found.items())
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
