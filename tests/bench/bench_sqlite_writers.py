"""Several processes that write to one SQLite file: ours beside SQLite's own way of waiting, which was ours before.

*Hot* processes write all the time, 64 callers each; a *slow* one writes every 20 ms and says how long each write took. Printed
are the hot ones' writes per second beside what one has alone, and the slow one's waiting times. Then 20 writes are queued
behind a lock that another process holds, and each says after how long it failed. At last conversations grow turn by turn
until their tokens no longer fit in memory, and the appends of each turn are timed.

    python tests/bench/bench_sqlite_writers.py [--json FILE] [--seconds 9] [--conversations 1000] [--tokens 32768] [--turns 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.errors import UnavailableError
from lightning.store.sqlite import SqliteStore
from lightning.store.sqlite.store import Writer
from lightning.types import Caller, Rollout, Run, Task, Transition, logprobs, token_ids

CALLERS = 64
ANSWER = 256
PAUSE = 0.02
WAYS = ("before", "ours")
_context = multiprocessing.get_context("spawn")


def wait_as_before() -> None:
    """Wait by SQLite's busy handler, one operation after the other, as the writer did before it had turns."""

    def begin(self: Any, deadline: float) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {int(self._settings.busy_timeout * 1000)}")
        self._connection.execute("BEGIN IMMEDIATE")
        self._transaction = sys.modules[Writer.__module__].SqliteTransaction(self._connection, self._parents)

    Writer._begin = begin  # type: ignore[method-assign]


class Source:
    """Model calls of uniformly random ids, cut from one long row of them: making them costs little."""

    def __init__(self, tokens: int) -> None:
        rng = random.Random(0)
        self._ids = token_ids(rng.randrange(151_000) for _ in range(tokens))
        self._scores = logprobs([-rng.expovariate(1.0) for _ in range(ANSWER)])

    def call(self, rollout: str, seq: int, start: int, prompt: int) -> Transition:
        """With `prompt` ids from `start` on, and an answer to them."""
        ids = self._ids[start : start + prompt + ANSWER]
        return Transition(
            rollout=rollout,
            attempt=1,
            seq=seq,
            id=f"chatcmpl-{rollout}-{seq}",
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            logprobs=self._scores,
            caller=Caller("writer"),
        )


async def hot(path: str, seconds: float, name: str) -> dict[str, Any]:
    """Append model calls all the time; how many a second."""
    store = SqliteStore(path)
    await store.open()
    rollouts = [f"{name}-{i}" for i in range(CALLERS)]
    await store.create_rollouts([Rollout(rollout, name, Task(rollout), rollout) for rollout in rollouts])
    await store.lease(name, "w", limit=CALLERS, ttl=3600)
    source = Source(2000)
    end, written = time.monotonic() + seconds, 0

    async def caller(rollout: str) -> None:
        nonlocal written
        seq = 0
        while time.monotonic() < end:
            await store.append([source.call(rollout, seq, seq % 500, 1000)])
            written += 1
            seq += 1

    await asyncio.gather(*(caller(rollout) for rollout in rollouts))
    await store.close()
    return {"per_second": written / seconds}


async def slow(path: str, seconds: float, _name: str) -> dict[str, Any]:
    """Write now and then; how long each write took."""
    store = SqliteStore(path)
    await store.open()
    end, took = time.monotonic() + seconds, []
    while time.monotonic() < end:
        began = time.monotonic()
        await store.put_state("run", "slow", began)
        took.append(time.monotonic() - began)
        await asyncio.sleep(PAUSE)
    await store.close()
    return {"took": took}


def _process(role: str, name: str, way: str, path: str, seconds: float, begin: Any, answers: Any) -> None:
    if way == "before":
        wait_as_before()
    begin.wait()
    answers.put(asyncio.run({"hot": hot, "slow": slow}[role](path, seconds, name)))


def side_by_side(path: Path, way: str, hot_ones: int, slow_ones: int, seconds: float) -> dict[str, float]:
    """So many processes of each kind at once."""

    async def prepare() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.put_run(Run("run", "bench"))
        await store.close()

    asyncio.run(prepare())
    roles = ["hot"] * hot_ones + ["slow"] * slow_ones
    begin, answers = _context.Barrier(len(roles)), _context.Queue()
    processes = [
        _context.Process(target=_process, args=(role, f"{role}-{number}", way, str(path), seconds, begin, answers))
        for number, role in enumerate(roles)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    took = sorted(seconds for each in found for seconds in each.get("took", ()))
    measured = {"hot_per_second": sum(each.get("per_second", 0.0) for each in found)}
    if took:
        measured |= {
            "slow_writes": len(took),
            "slow_p50_ms": statistics.median(took) * 1e3,
            "slow_p90_ms": took[int(len(took) * 0.9)] * 1e3,
            "slow_worst_ms": took[-1] * 1e3,
        }
    return measured


def fairness(root: Path, seconds: float) -> dict[str, float]:
    """One hot process alone, beside a slow one, and two beside a slow one; both ways in turn."""
    found: dict[str, float] = {}
    for name, hot_ones, slow_ones in (("alone", 1, 0), ("one_hot", 1, 1), ("two_hot", 2, 1)):
        for way in WAYS:
            measured = side_by_side(root / f"{name}-{way}.db", way, hot_ones, slow_ones, seconds)
            found |= {f"{name}_{way}_{what}": value for what, value in measured.items()}
    for way in WAYS:
        alone = found[f"alone_{way}_hot_per_second"]
        for name in ("one_hot", "two_hot"):
            found[f"{name}_{way}_of_alone"] = found[f"{name}_{way}_hot_per_second"] / alone
    for name in ("one_hot", "two_hot"):
        found[f"{name}_slow_writes_ratio"] = found[f"{name}_ours_slow_writes"] / found[f"{name}_before_slow_writes"]
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another connection holds the lock for the length of the block."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.close()


async def queued(path: Path, busy_timeout: float, writes: int) -> list[float]:
    """After how many seconds each of some writes failed that were queued at once behind a lock."""
    store = SqliteStore(path, busy_timeout=busy_timeout)
    await store.open()

    async def write(name: int) -> float:
        began = time.monotonic()
        try:
            await store.put_state("run", str(name), name)
        except UnavailableError:
            return time.monotonic() - began
        raise AssertionError("the lock is held")

    with locked(path):
        took = await asyncio.gather(*(write(name) for name in range(writes)))
    await store.close()
    return took


def _queued_process(way: str, path: Path, busy_timeout: float, answers: Any) -> None:
    if way == "before":
        _queue_as_before()
    answers.put(asyncio.run(queued(path, busy_timeout, 20)))


def _queue_as_before() -> None:
    """Each write waits for the whole time when it comes to its turn."""
    wait_as_before()

    def begin_for_first(self: Any) -> bool:
        self._begin(0.0)  # what it raises fails the first of those that wait
        return True

    Writer._begin_for_waiting = begin_for_first  # type: ignore[method-assign]


def deadlines(root: Path, busy_timeout: float = 0.5) -> dict[str, float]:
    """When the first and the last of 20 writes behind a held lock fail."""
    found: dict[str, float] = {}
    for way in WAYS:
        answers = _context.Queue()
        process = _context.Process(target=_queued_process, args=(way, root / f"q-{way}.db", busy_timeout, answers))
        process.start()
        took = answers.get()
        process.join()
        found |= {f"queued_{way}_first_s": min(took), f"queued_{way}_last_s": max(took)}
    return found


async def conversations(path: Path, count: int, tokens: int, turns: int) -> list[tuple[float, float]]:
    """Appends per second, and microseconds of CPU for each, in each turn of so many conversations, which have so many tokens in
    their last one."""
    store = SqliteStore(path)
    await store.open()
    await store.put_run(Run("run", "bench"))
    names = [f"rollout-{i:08x}" for i in range(count)]
    for at in range(0, count, 500):
        await store.create_rollouts([Rollout(name, "run", Task(name), name) for name in names[at : at + 500]])
    while await store.lease("run", "w", limit=500, ttl=36000):
        pass
    source = Source(tokens + count)
    first = tokens // 4
    added = (tokens - ANSWER - first) // turns
    found = []
    for seq in range(turns):
        began, cpu = time.perf_counter(), time.process_time()
        for at in range(0, count, CALLERS):
            some = range(at, min(at + CALLERS, count))
            await asyncio.gather(
                *(store.append([source.call(names[number], seq, number, first + seq * added)]) for number in some)
            )
        cpu = time.process_time() - cpu
        found.append((count / (time.perf_counter() - began), cpu / count * 1e6))
    await store.close()
    return found


def main(given: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a table, write JSON."""
    with tempfile.TemporaryDirectory(prefix="lightning-bench-") as folder:
        root = Path(folder)
        found: dict[str, Any] = {}
        if "writers" in given.only:
            found |= fairness(root, given.seconds)
        if "queued" in given.only:
            found |= deadlines(root)
        if "conversations" in given.only:
            rates = asyncio.run(conversations(root / "c.db", given.conversations, given.tokens, given.turns))
            for turn, (rate, cpu) in enumerate(rates, 1):
                found |= {f"turn_{turn}_appends_per_second": rate, f"turn_{turn}_append_cpu_us": cpu}
    sys.stdout.write("".join(f"{name:<48}{value:>12,.3f}\n" for name, value in found.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", nargs="*", default=["writers", "queued", "conversations"])
    parser.add_argument("--seconds", type=float, default=9.0)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=20)
    main(parser.parse_args())
