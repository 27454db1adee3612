"""A folder of runs as people have one: finished ones of two seeds, one that goes on, half written ones, and what is broken."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.trainer.context import mark_over
from lightning.types import Fault, Outcome, Rollout, Run, Task

from tests.plugins.debug.made_runs import Maker, Plot, State

MARKUP = "<img src=x onerror=alert(1)>"
STEPS = 4


def learns(step: int) -> State:
    """A policy that gets better."""
    return State(skill=-1.0 + 0.8 * step, timeouts=0.15, lost=0.1)


def plot(run: str, seed: int, **settings: object) -> Plot:
    """A short run."""
    return Plot(
        run, learns, seed, steps=STEPS, tasks=12, held_out=6, tasks_per_step=3, group_size=4, eval_every=2,
        grade=lambda right, tokens: {"correct": float(right), "brief": -tokens / 1000},
        settings={"trainer.seed": seed, **settings},
    )  # fmt: skip


async def in_store(folder: Path, write: Callable[[Store], Awaitable[object]]) -> None:
    """Write into a run's own store."""
    folder.mkdir(parents=True, exist_ok=True)
    store = plugins().store(sqlite_url(folder / "lightning.db"))
    await store.open()
    try:
        await write(store)
    finally:
        await store.close()


async def write_all(folder: Path) -> None:
    """All of them."""
    await in_store(folder / "one", lambda store: Maker(store, plot("one", 1)).write())
    await in_store(folder / "two", lambda store: Maker(store, plot("two", 1, **{"engine.lr": 2e-6})).write())
    await in_store(folder / "searched", searched)
    await in_store(folder / "half", half)
    await in_store(folder / "broke", broke)
    await in_store(folder / "on", goes_on)
    await in_store(folder / "marked", marked)
    await in_store(folder / "old", half)
    with sqlite3.connect(folder / "old" / "lightning.db") as database:
        database.execute("UPDATE schema_version SET version = 1")
    (folder / "torn").mkdir()
    (folder / "torn" / "lightning.db").write_bytes(b"SQLite format 3\x00" + b"\x00" * 80)


async def searched(store: Store) -> None:
    """A run that ended without a step, as an evaluation does."""
    await store.put_run(Run("searched", "searched", {"model": "m", "tasks": {"train": [], "val": ["t"]}}, 1.7e9))
    await store.create_rollouts([Rollout("searched/val/0/0", "searched", Task("q"), "searched/val/0/0", split="val")])
    for lease in await store.lease("searched", "w"):
        await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=0.5))
    await mark_over(store, "searched", True)


async def half(store: Store) -> None:
    """A run that was created long ago, and nothing more."""
    await store.put_run(Run("half", "half", {}, 1.7e9))


async def broke(store: Store) -> None:
    """A run of which every rollout of the first step failed."""
    await store.put_run(Run("broke", "broke", {"model": "m"}, 1.7e9))
    await store.create_rollouts(
        [Rollout(f"broke/1/0/{n}", "broke", Task(MARKUP), "broke/1/0", 1, index=n, max_attempts=1) for n in range(3)]
    )
    for lease in await store.lease("broke", "w", limit=3):
        error = f'Traceback (most recent call last):\n  File "/home/me/agent.py", line 3, in run\nKeyError: {MARKUP!r}'
        await store.complete(lease.rollout.id, lease.attempt, Outcome(fault=Fault.AGENT, error=error))


async def goes_on(store: Store) -> None:
    """A run whose first step is being sampled."""
    await store.put_run(Run("on", "on", {"model": "m"}, time.time()))
    await store.create_rollouts([Rollout(f"on/1/0/{n}", "on", Task("q"), "on/1/0", 1, index=n) for n in range(3)])
    for lease in await store.lease("on", "w", limit=2):
        if lease.rollout.index == 0:
            await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=0.25))


async def marked(store: Store) -> None:
    """A run with a name that has markup, a comma and what keys are made with."""
    await store.put_run(Run(f"{MARKUP},~%", "x", {"model": MARKUP}, 1.7e9))


def make_folder(folder: Path) -> Path:
    """Write it, and return it."""
    asyncio.run(write_all(folder))
    return folder
