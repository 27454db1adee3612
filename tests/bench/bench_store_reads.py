"""Reading a run back from SQLite: in sums, in pages and many at once, beside one by one, which was our way before.

Three things are read: the line of a run in `lightning runs`, which needs counts of all its rollouts; everything that is loaded
to take a committed step again; and the list of a long run's steps. Each way runs in a process of its own. Printed are CPU
seconds, the peak of the process' memory above what it had before it read, and calls of the store.

    python tests/bench/bench_store_reads.py [--json FILE] [--rollouts 200000] [--steps 3000] [--step-rollouts 512]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lightning.cli.runs import _row
from lightning.store.pages import each_rollout, each_step
from lightning.store.sqlite import SqliteStore
from lightning.trainer.training_data import load_groups
from lightning.types import Outcome, Rollout, Run, StepRecord, Task, ToolEvent

RUN = "run"
_context = multiprocessing.get_context("spawn")


class Counting:
    """A store that counts the calls of its methods."""

    def __init__(self, store: SqliteStore) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return await method(*args, **options)

        return counted


async def fill(path: Path, rollouts: int, steps: int, members: int) -> None:
    """A run with so many ended rollouts, a fiftieth of them held out; one whose first step has `members` rollouts; and one of
    `steps` long step records."""
    store = SqliteStore(path)
    await store.open()
    for run in (RUN, "step", "steps"):
        await store.put_run(Run(run, run))
    for start in range(0, rollouts, 10_000):
        some = range(start, min(start + 10_000, rollouts))
        await store.create_rollouts(
            [
                Rollout(f"{RUN}/{n}", RUN, Task({"q": n}), f"g{n // 8}", n // 512, "val" if n % 50 == 0 else "train")
                for n in some
            ]
        )
    names = [f"step/{n}" for n in range(members)]
    await store.create_rollouts([Rollout(name, "step", Task("q"), f"step/{n // 8}") for n, name in enumerate(names)])
    for lease in await store.lease("step", "w", limit=members):
        outcome = Outcome(reward=1.0, tool_events=(ToolEvent("tool", "ok", at=1.0),))
        await store.complete(lease.rollout.id, lease.attempt, outcome)
    await store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE rollouts SET status = 'succeeded', attempt = 1, reward = 0.5 WHERE run = ?", (RUN,))
        record = (json.dumps([[f"steps/{n}", 1] for n in range(512)]), json.dumps(["d" * 64] * 512), "e" * 64)
        database.executemany(
            "INSERT INTO steps (run, step, policy_version, rollouts, digests, digest, checkpoint, metrics, group_ids, "
            "context, at, policy) VALUES ('steps', ?, ?, ?, ?, ?, '', '{\"reward\": 0.5}', '[]', '{}', 1.0, 'policy')",
            ((step, step, *record) for step in range(1, steps + 1)),
        )


async def line_before(store: Any) -> Any:
    """Every rollout twice: for the counts, and for the summary, which kept none."""
    states = Counter([rollout.status async for rollout in each_rollout(store, RUN)])
    everything = [rollout async for rollout in each_rollout(store, RUN)]
    return states, len(everything)


async def line_now(store: Any) -> Any:
    """As `lightning runs` does it."""
    return await _row(store, Run(RUN, RUN), "sqlite:///bench")


async def step_before(store: Any) -> Any:
    """Tool events and step rewards of each rollout by calls of their own."""
    page = await store.list_rollouts("step", split="train", step=0)
    await store.transitions_of([(rollout.id, rollout.attempt) for rollout in page.items])
    for rollout in page.items:
        for _ in ("tool events", "step rewards"):
            await store.attempts_of([(rollout.id, rollout.attempt)])


async def step_now(store: Any) -> Any:
    """As training and audit do it."""
    page = await store.list_rollouts("step", split="train", step=0)
    return await load_groups(store, page.items, ())


async def list_before(store: Any) -> Any:
    """Whole records, all at once."""
    return await store.steps("steps")


async def list_now(store: Any) -> Any:
    """Brief ones, as summaries read them."""
    return await store.steps("steps", brief=True)


async def pages_now(store: Any) -> Any:
    """Whole ones page by page, as exports read them."""
    count = 0
    record: StepRecord
    async for record in each_step(store, "steps"):
        count += bool(record.rollouts)
    return count


WAYS: dict[str, dict[str, Callable[[Any], Awaitable[Any]]]] = {
    "line of a run": {"before": line_before, "ours": line_now},
    "a step of rollouts": {"before": step_before, "ours": step_now},
    "list of steps": {"before": list_before, "ours": list_now, "ours, whole in pages": pages_now},
}


def measure(path: Path, what: str, way: str, answers: Any) -> None:
    """Read once in this process, and say what it took."""

    async def read() -> dict[str, float]:
        store = SqliteStore(path)
        await store.open()
        counting = Counting(store)
        memory, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        await WAYS[what][way](counting)
        took = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await store.close()
        return {"cpu_seconds": took, "peak_mb": (peak - memory) / 1024, "calls": counting.calls}

    answers.put(asyncio.run(read()))


def main(given: argparse.Namespace) -> None:
    """Fill a file, read it in each way, print and keep the figures."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        asyncio.run(fill(path, given.rollouts, given.steps, given.step_rollouts))
        for what, ways in WAYS.items():
            for way in ways:
                answers = _context.Queue()
                process = _context.Process(target=measure, args=(path, what, way, answers))
                process.start()
                taken = found.setdefault(what, {})[way] = answers.get(timeout=600)
                process.join()
                ratio = found[what]["before"]["cpu_seconds"] / taken["cpu_seconds"]
                sys.stdout.write(
                    f"{what:20} {way:22} {taken['cpu_seconds']:8.3f} CPU s {taken['peak_mb']:8.1f} MB "
                    f"{taken['calls']:6.0f} calls   before/this: {ratio:.1f}\n"
                )
    if given.json:
        given.json.write_text(
            json.dumps({"settings": {**vars(given), "json": str(given.json)}, "found": found}, indent=1)
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rollouts", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-rollouts", type=int, default=512)
    main(parser.parse_args())
