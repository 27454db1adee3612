"""NOTIFY within the transaction, as PostgreSQL's store does it, beside NOTIFY in a statement of its own behind the COMMIT.

PostgreSQL commits transactions that notify one after the other: it holds a lock of the whole server from the NOTIFY to the end
of the COMMIT. Several processes write small values, each with some callers; printed are writes per second, both ways in turn.

    python tests/bench/bench_postgres_notify.py [--json FILE] [--seconds 4] [--writers 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_postgres import connection, connections
from lightning_postgres.store import PostgresStore

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.servers.postgres import PostgresServer

CALLERS = 8
WAYS = ("inside", "outside", "none")
_context = multiprocessing.get_context("spawn")


def notify_outside(*, never: bool) -> None:
    """Commit first, then tell the watches in a transaction of its own, or not at all."""
    transact = connections.Connections._transact
    told = connection.PostgresTransaction.commit.fget
    connection.PostgresTransaction.commit = property(lambda _: "COMMIT")  # type: ignore[assignment, method-assign]

    async def commit_and_notify(self: Any, session: Any, operation: Any) -> Any:
        transactions = []

        async def remembered(transaction: Any) -> Any:
            transactions.append(transaction)
            return await operation(transaction)

        result = await transact(self, session, remembered)
        notify = told(transactions[-1]).removesuffix("COMMIT")
        if notify and not never:
            await session.execute(notify)
        return result

    connections.Connections._transact = commit_and_notify  # type: ignore[method-assign, assignment]


async def write(url: str, seconds: float, name: str) -> float:
    """Writes per second of one process."""
    store = PostgresStore.from_url(url)
    await store.open()
    end, written = time.monotonic() + seconds, 0

    async def caller(number: int) -> None:
        nonlocal written
        while time.monotonic() < end:
            await store.put_state(name, str(number), written, once=None)
            written += 1

    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    await store.close()
    return written / seconds


def _process(way: str, url: str, seconds: float, name: str, begin: Any, answers: Any) -> None:
    if way != "inside":
        notify_outside(never=way == "none")
    begin.wait()
    answers.put(asyncio.run(write(url, seconds, name)))


def measure(way: str, url: str, seconds: float, writers: int) -> float:
    """Writes per second of all processes."""
    begin, answers = _context.Barrier(writers), _context.Queue()
    processes = [
        _context.Process(target=_process, args=(way, url, seconds, f"run-{number}", begin, answers))
        for number in range(writers)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(found)


def main(given: argparse.Namespace) -> dict[str, float]:
    """Measure, print a table, write JSON."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory(prefix="lightning-bench-") as folder,
        PostgresServer(Path(folder) / "postgres", settings=()) as server,
    ):
        for _ in range(given.rounds):
            for way in WAYS:
                rates[way].append(measure(way, server.url, given.seconds, given.writers))
    found = {f"notify_{way}_writes_per_second": statistics.median(each) for way, each in rates.items()}
    found["outside_to_inside"] = found["notify_outside_writes_per_second"] / found["notify_inside_writes_per_second"]
    sys.stdout.write("".join(f"{name:<48}{value:>12,.3f}\n" for name, value in found.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args())
