"""What it adds to a weight update that other servers' gateways hold their calls, too.

A trainer's `Owner` holds and releases as an update does, with an update of no seconds, while 0, 1, 2 and 4 gateways, each a
process of its own, serve the run over the same database. Measured: seconds until every gateway has stopped (`stop`), seconds
until the end is announced (`announce`), and how long a call that came first thing in the hold waited at a gateway (`held`).
With 0 gateways it is what a trainer pays that is alone.

    python tests/bench/bench_fleet.py [--json FILE] [--updates 30] [URL ...]

Without a URL: SQLite in a temporary folder, and Postgres and Redis from the project's own test servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (0, 1, 2, 4)
PAUSE = 0.3
"""Seconds between two updates."""


async def gateway(url: str, run: str) -> None:
    """A gateway process: a seat, and a call every few milliseconds that only waits at the gate."""
    from lightning.plugins import plugins
    from lightning_server.fleet.member import Member

    store = plugins().store(url)
    await store.open()
    member = Member(store, run, 600.0)
    following = asyncio.create_task(member.follow())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    waits: list[float] = []
    while not stop.is_set():
        waited = await member.policy.gate.wait()
        if waited and member.seated:
            waits.append(waited)
        await asyncio.sleep(0.004)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await member.leave()
    await store.close()
    sys.stdout.write(json.dumps(waits[1:]))  # the first was before it had a seat


async def measure(url: str, count: int, updates: int) -> dict[str, float]:
    """One row."""
    from lightning.gateway.upstream import Upstream
    from lightning.plugins import plugins
    from lightning.policy_server.protocol import Update
    from lightning_server.fleet.owner import Owner

    store = plugins().store(url)
    await store.open()
    run = f"fleet-{count}-{os.getpid()}"
    owner = Owner(store, run)
    await owner.open([Upstream("http://127.0.0.1:1", "tiny")], 0)
    command = [sys.executable, __file__, "--gateway", url, "--run", run]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    while owner.others < count:
        async with owner.hold():
            pass
        await asyncio.sleep(PAUSE)
    await asyncio.sleep(2 * PAUSE)
    stops, announces = [], []
    cpu = time.process_time()
    for version in range(1, updates + 1):
        began = time.perf_counter()
        async with owner.hold() as hold:
            stopped = time.perf_counter()
            hold.update = Update(version)
        stops.append(stopped - began)
        announces.append(time.perf_counter() - stopped)
        await asyncio.sleep(PAUSE)
    cpu = (time.process_time() - cpu) / updates
    held: list[float] = []
    for process in others:
        process.terminate()
        held += json.loads(process.communicate()[0])
    await owner.close()
    await store.close()
    row = {"gateways": count, "cpu_ms": 1e3 * cpu}
    for name, values in (("stop", stops), ("announce", announces), ("held", held)):
        if values:
            p95 = sorted(values)[ceil(0.95 * len(values)) - 1]  # of one value, too, as a slow machine may give
            row |= {f"{name}_p50_ms": 1e3 * median(values), f"{name}_p95_ms": 1e3 * p95}
    return row


@contextlib.contextmanager
def databases(given: list[str]) -> Iterator[dict[str, str]]:
    """The stores to measure, by name."""
    if given:
        yield {url.partition(":")[0]: url for url in given}
        return
    sys.path.insert(0, str(ROOT))
    from tests.servers.postgres import PostgresServer
    from tests.servers.redis import RedisServer

    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        redis = RedisServer(Path(folder)).start()
        try:
            yield {
                "sqlite": f"sqlite:///{folder}/fleet.db",
                "postgres": postgres.url_of("fleet", pool=4, timeout=20, ssl="disable"),
                "redis": redis.url(),
            }
        finally:
            redis.kill()


def main() -> None:
    """Print a table; write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--gateway")
    parser.add_argument("--run")
    options = parser.parse_args()
    if options.gateway:
        asyncio.run(gateway(options.gateway, options.run))
        return
    rows = []
    with databases(options.urls) as found:
        for name, url in found.items():
            for count in COUNTS:
                row = {"store": name} | asyncio.run(measure(url, count, options.updates))
                rows.append(row)
                said = "  ".join(f"{key} {value:.1f}" for key, value in row.items() if isinstance(value, float))
                sys.stdout.write(f"{name:9} {count} other gateways  {said}\n")
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
