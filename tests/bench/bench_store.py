"""The store beside the naive way: one JSON text per transition, one commit per call.

Measures bytes per transition (1,000 prompt + 256 response ids, the prompt of each turn continuing the one before), durable
appends per second with one and with many callers, lease + complete per second, and whole rollouts per second (create, lease,
three transitions, complete) on SQLite, on a PostgreSQL of its own, which flushes every commit to the disk, and on a Redis of
its own, with `appendfsync always` (a flush for each batch) and `no`.

    python tests/bench/bench_store.py [--json FILE] [--only rollouts]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning.store import Store
from lightning.store.sqlite import SqliteStore
from lightning.types import Caller, Lease, Outcome, Rollout, Run, Task, Transition, VersionRun, logprobs, token_ids
from lightning_postgres.store import PostgresStore
from lightning_redis.store import RedisStore

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

VOCABULARY = 151_000
ROLLOUTS = 1600
"""Whole rollouts on each store."""
PROMPT, RESPONSE, OBSERVATION = 1000, 256, 50
"""Tokens of the first prompt, of each response, and of what the environment adds between two turns."""


def conversations(rollouts: int, turns: int, group: int, seed: int = 0) -> list[list[Transition]]:
    """Calls of `rollouts` agents; uniformly random ids and log-probabilities are the worst case for compression."""
    rng = random.Random(seed)
    made = []
    for index in range(rollouts):
        if index % group == 0:
            start = _ids(rng, PROMPT - (turns - 1) * (RESPONSE + OBSERVATION) // 2)
        prompt, calls = list(start), []
        for seq in range(turns):
            response = _ids(rng, RESPONSE)
            calls.append(
                Transition(
                    rollout=f"rollout-{index:016x}",
                    attempt=1,
                    seq=seq,
                    id=f"chatcmpl-{rng.getrandbits(128):032x}",
                    prompt_ids=token_ids(prompt),
                    response_ids=token_ids(response),
                    logprobs=logprobs([-rng.expovariate(1.0) for _ in range(RESPONSE)]),
                    caller=Caller(
                        "writer", ("agent", "writer"), span_id=f"{rng.getrandbits(64):016x}", framework="raw"
                    ),
                    versions=(VersionRun(0, 7),),
                    finish_reason="stop",
                    started_at=1.79e9 + rng.random(),
                    ended_at=1.79e9 + rng.random(),
                )
            )
            prompt += [*response, *_ids(rng, OBSERVATION)]
        made.append(calls)
    return made


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def rollouts_of(count: int, group: int) -> list[Rollout]:
    """Pending rollouts, `group` per task."""
    return [
        Rollout(f"rollout-{i:016x}", "run", Task({"question": i // group}), f"group-{i // group}", index=i % group)
        for i in range(count)
    ]


async def opened(store: Store, count: int, group: int) -> Store:
    """A store with `count` pending rollouts."""
    await store.open()
    await store.put_run(Run("run", "bench"))
    await store.create_rollouts(rollouts_of(count, group))
    return store


async def ours_appends(
    path: Path, calls: list[list[Transition]], group: int, callers: int, sync: str
) -> dict[str, float]:
    """What appends to SQLite take, of time and of room; and what reading them back takes."""
    store = await opened(SqliteStore(path, sync=sync), len(calls), group)
    await store.lease("run", "w", limit=len(calls), ttl=3600)
    before = _size(path)
    per_second, cpu = await appending(store, calls, callers)
    began = time.perf_counter()
    await store.transitions_of([(rollout[0].rollout, 1) for rollout in calls[:128]])
    reading = time.perf_counter() - began
    await store.close()
    return {
        "per_second": per_second,
        "cpu_us": cpu,
        "bytes": (_size(path) - before) / sum(map(len, calls)),
        "read_ms": reading * 1e3,
    }


async def appending(store: Store, calls: list[list[Transition]], callers: int) -> tuple[float, float]:
    """Each caller awaits one append after the other, as a gateway's requests do: appends per second, and microseconds of this
    process's CPU for one. Their rollouts are leased."""
    queue = [iter(calls[i::callers]) for i in range(callers)]

    async def caller(mine: Iterable[Sequence[Transition]]) -> None:
        for rollout in mine:
            for call in rollout:
                await store.append([call])

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller(mine) for mine in queue))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = sum(map(len, calls))
    return count / seconds, cpu / count * 1e6


def naive_appends(path: Path, calls: list[list[Transition]], sync: str) -> dict[str, float]:
    """One JSON text per row, one commit per row."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {sync}")
    connection.execute(
        "CREATE TABLE t (rollout TEXT, attempt INT, seq INT, body TEXT, PRIMARY KEY (rollout, attempt, seq))"
    )
    before, count = _size(path), sum(map(len, calls))
    began = time.perf_counter()
    for call in (call for rollout in calls for call in rollout):
        body = asdict(call)
        for name in ("prompt_ids", "response_ids", "logprobs"):
            body[name] = body[name].tolist()
        connection.execute(
            "INSERT INTO t VALUES (?, ?, ?, ?)", (call.rollout, call.attempt, call.seq, json.dumps(body))
        )
    seconds = time.perf_counter() - began
    connection.close()
    return {"per_second": count / seconds, "bytes": (_size(path) - before) / count}


async def leases(store: Store, count: int, callers: int) -> float:
    """Lease one rollout and complete it, until none is left; rollouts per second."""
    await opened(store, count, 8)

    async def worker(name: str) -> None:
        while held := await store.lease("run", name):
            await store.complete(held[0].rollout.id, held[0].attempt, Outcome(reward=1.0))

    began = time.perf_counter()
    await asyncio.gather(*(worker(f"w{i}") for i in range(callers)))
    seconds = time.perf_counter() - began
    await store.close()
    return count / seconds


async def whole_rollouts(store: Store, count: int, callers: int) -> tuple[float, float]:
    """Create, lease, append three calls one after the other, complete: rollouts per second, and microseconds of this process's
    CPU for one."""
    await store.open()
    calls = {made[0].rollout: made for made in conversations(count, 3, 8)}
    groups = [rollouts_of(count, 8)[at : at + 8] for at in range(0, count, 8)]

    done: set[str] = set()

    async def worker(name: str) -> None:
        leased: Sequence[Lease] = ()
        while groups or leased:
            if groups:
                await store.create_rollouts(groups.pop(0))
            leased = await store.lease("run", name, limit=8)
            for held in leased:
                for call in calls[held.rollout.id]:
                    await store.append([call])
                await store.complete(held.rollout.id, held.attempt, Outcome(reward=1.0))
                done.add(held.rollout.id)

    began, cpu = time.perf_counter(), time.process_time()
    await store.put_run(Run("run", "bench"))
    await asyncio.gather(*(worker(f"w{i}") for i in range(callers)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert len(done) == count, "every rollout was completed"
    await store.close()
    return count / seconds, cpu / count * 1e6


def whole(root: Path, count: int) -> dict[str, float]:
    """Whole rollouts per second on each store, 64 workers at once."""
    found: dict[str, float] = {}
    with PostgresServer(root / "postgres", settings=()) as server:
        stores = {
            "sqlite": SqliteStore(root / "normal.db"),
            "sqlite_full": SqliteStore(root / "full.db", sync="full"),
            "postgres": PostgresStore.from_url(server.url),
        }
        for name, store in stores.items():
            per_second, cpu = asyncio.run(whole_rollouts(store, count, 64))
            found[f"{name}_rollouts_per_second"], found[f"{name}_rollout_cpu_us"] = per_second, cpu
    for appendfsync in ("always", "no"):
        folder = root / f"redis-{appendfsync}"
        folder.mkdir()
        with RedisServer(folder, appendfsync=appendfsync) as redis:
            before, name = redis.used_memory(), f"redis_{appendfsync}"
            per_second, cpu = asyncio.run(whole_rollouts(RedisStore.from_url(redis.url()), count, 64))
            found[f"{name}_rollouts_per_second"], found[f"{name}_rollout_cpu_us"] = per_second, cpu
            found["redis_memory_per_transition"] = (redis.used_memory() - before) / (3 * count)
            found["redis_file_per_transition"] = (folder / "appendonly.aof").stat().st_size / (3 * count)
    found["postgres_to_sqlite_full"] = found["postgres_rollouts_per_second"] / found["sqlite_full_rollouts_per_second"]
    return found


def _size(path: Path) -> int:
    """Bytes of the database with its log folded in."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.stat().st_size


def main(out: Path | None = None, only: str = "") -> dict[str, float]:
    """Measure, print a table, write JSON to `out`."""
    found: dict[str, float] = {} if only else appends()
    with tempfile.TemporaryDirectory(prefix="lightning-bench-") as folder:
        found |= whole(Path(folder), ROLLOUTS)
    sys.stdout.write("".join(f"{name:<48}{value:>12,.1f}\n" for name, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


def appends(rollouts: int = 512, turns: int = 4, group: int = 8) -> dict[str, float]:
    """What is measured on SQLite alone."""
    calls = conversations(rollouts, turns, group)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for sync in ("normal", "full"):
            naive = naive_appends(root / f"naive-{sync}.db", calls, sync)
            found[f"naive_{sync}_appends_per_second"] = naive["per_second"]
            found["naive_bytes_per_transition"] = naive["bytes"]
            for callers in (1, 64):
                mine = asyncio.run(ours_appends(root / f"{sync}-{callers}.db", calls, group, callers, sync))
                found[f"{sync}_{callers}_callers_appends_per_second"] = mine["per_second"]
                found[f"{sync}_{callers}_callers_cpu_us"] = mine["cpu_us"]
                found["bytes_per_transition"] = mine["bytes"]
                found["read_128_rollouts_ms"] = mine["read_ms"]
        lone = asyncio.run(ours_appends(root / "lone.db", conversations(rollouts, turns, 1), 1, 64, "normal"))
        found["bytes_per_transition_without_siblings"] = lone["bytes"]
        for callers in (1, 64):
            found[f"lease_complete_{callers}_workers_per_second"] = asyncio.run(
                leases(SqliteStore(root / f"l{callers}.db"), 2000, callers)
            )
    found["bytes_ratio"] = found["naive_bytes_per_transition"] / found["bytes_per_transition"]
    found["full_64_callers_ratio"] = (
        found["full_64_callers_appends_per_second"] / found["naive_full_appends_per_second"]
    )
    found["normal_64_callers_ratio"] = (
        found["normal_64_callers_appends_per_second"] / found["naive_normal_appends_per_second"]
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", choices=["rollouts"], default="", help="measure whole rollouts only")
    given = parser.parse_args()
    main(given.json, given.only)
