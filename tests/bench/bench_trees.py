"""Two checkouts beside each other: what a call costs, what each store takes a second, and how long a command and an agent's
process take to begin.

Of a gateway over SQLite it measures the CPU of a chat call with an answer of about 28 KB, of one with a prompt of 65,536
tokens, and of a branch's call (`bench_gateway.py` has the servers and the load).

On SQLite, PostgreSQL and Redis (real servers, with their usual durability) it measures durable appends, leases with completes,
and whole rollouts a second; then the time until `lightning runs` has listed one run, until a runner is ready, and from an
attempt to its outcome in a process of its own. Each figure is measured in a fresh process of either checkout, in turns, so that
a load of the machine falls on both; printed are medians and the ratio. The other checkout runs with its own `.venv` where it
has one, since plugins are found by what is installed, and with the folders of its packages in PYTHONPATH.

    python tests/bench/bench_trees.py [TREE] [--rounds 5] [--only redis] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bench_gateway
from bench_store import appending, conversations, leases, opened, whole_rollouts
from lightning.config import RunnerConfig
from lightning.plugins import plugins
from lightning.runner.process import ProcessRunner
from lightning.types import LLM, Lease, Rollout, Run, Task

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

HERE = Path(__file__).parents[2]
CALLERS = 64
CALLED, LEASED, WHOLE = 256, 1000, 400
"""Rollouts whose four calls are appended, that are leased and completed, and that are made whole."""
ATTEMPTS = 20
CALLS, LONG_CALLS, LONG_PROMPT = 600, 40, 65_536
"""Calls of a gateway, those of them with a long prompt, and its tokens."""
KINDS = ("gateway", "sqlite", "postgres", "redis", "start")
NAME = "NAME"
"""What stands in a store's URL for a name that nothing else has."""


async def stored(url: str) -> dict[str, float]:
    """Figures of the store with this URL, each a second."""

    def store(name: str):
        return plugins().store(url.replace(NAME, f"{name}{os.getpid()}"))

    calls = conversations(CALLED, 4, 8)
    appended = await opened(store("appends"), CALLED, 8)
    await appended.lease("run", "w", limit=CALLED, ttl=3600)
    appends, _ = await appending(appended, calls, CALLERS)
    await appended.close()
    leased = await leases(store("leases"), LEASED, CALLERS)
    rollouts, _ = await whole_rollouts(store("rollouts"), WHOLE, CALLERS)
    return {"appends a second": appends, "leases a second": leased, "rollouts a second": rollouts}


def called() -> dict[str, float]:
    """Figures of a gateway."""
    found: dict[str, float] = {}
    with bench_gateway.running("backend") as (backend, _):
        for role in ("ours", "branches"):
            with bench_gateway.running(role, backend.url) as (server, _):
                found |= asyncio.run(_cpu_of(role, server))
    os.environ["BENCH_PROMPT"] = str(LONG_PROMPT)
    with bench_gateway.running("backend") as (backend, _), bench_gateway.running("ours", backend.url) as (server, _):
        found |= asyncio.run(_cpu_of("long", server))
    return found


async def _cpu_of(role: str, server: bench_gateway.Server) -> dict[str, float]:
    """Milliseconds of the server's CPU for a call."""
    async with bench_gateway.session() as http:
        if role == "branches":
            return {"CPU of a branch's call, ms": await bench_gateway.cpu_of_a_branch_call(http, server)}
        if role == "long":
            said = [{"role": "user", "content": "word " * LONG_PROMPT}]
            await bench_gateway.cpu_of_a_call(http, server, 4, 8, messages=said)
            cpu = await bench_gateway.cpu_of_a_call(http, server, 4, LONG_CALLS, messages=said)
            return {"CPU of a call with a long prompt, ms": cpu}
        found = {}
        for concurrency in bench_gateway.CONCURRENCIES:
            await bench_gateway.cpu_of_a_call(
                http, server, concurrency, CALLS
            )  # a gateway's first seconds are its start
            cpu = await bench_gateway.cpu_of_a_call(http, server, concurrency, CALLS)
            found[f"CPU of a call, {concurrency} at a time, ms"] = cpu
        return found


async def started(folder: Path) -> dict[str, float]:
    """Figures of what begins, in milliseconds."""
    (folder / "runs" / "one").mkdir(parents=True)
    store = plugins().store(f"sqlite:///{folder}/runs/one/lightning.db")
    await store.open()
    await store.put_run(Run("one", "one"))
    await store.close()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lightning", "runs"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    listed = time.perf_counter() - began

    def agent(task: Task, llm: LLM) -> float:
        return 1.0

    runner = ProcessRunner(agent, RunnerConfig(concurrency=1, rollouts_per_process=1))
    began = time.perf_counter()
    await runner.start()
    ready = time.perf_counter() - began
    attempts = []
    for number in range(ATTEMPTS):
        lease = Lease(Rollout(str(number), "run", Task(number), "g", attempt=1), "w", 0.0)
        began = time.perf_counter()
        outcome = await runner.run(lease, LLM("http://127.0.0.1:1/v1", "key", "policy"))
        attempts.append(time.perf_counter() - began)
        assert outcome.reward == 1.0, outcome.error
    await runner.close()
    named = {
        "lightning runs": listed,
        "a runner is ready": ready,
        "an attempt in its process": statistics.median(attempts),
    }
    return {f"{name}, ms": 1e3 * seconds for name, seconds in named.items()}


@contextmanager
def place(kind: str, root: Path) -> Iterator[str]:
    """What is to be measured: the URL of a store, or nothing."""
    folder = root / kind
    folder.mkdir()
    if kind == "sqlite":
        yield f"sqlite:///{folder}/{NAME}.db"
    elif kind == "postgres":
        with PostgresServer(folder, settings=()) as server:
            yield server.url_of(NAME)
    elif kind == "redis":
        with RedisServer(folder, appendfsync="always") as redis:
            yield redis.url(f"prefix={NAME}")
    else:
        yield "gateway" if kind == "gateway" else ""


def measured(tree: Path, url: str, compiled: Path) -> dict[str, float]:
    """What a fresh process of a checkout measures. Its modules are compiled once, in a folder, as an installation has them."""
    own = tree / ".venv/bin/python"
    packages = [tree / "core", *sorted((tree / "plugins").iterdir()), *sorted((tree / "adapters").iterdir())]
    command = [str(own if own.exists() else sys.executable), __file__, "--here", url]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "PYTHONPYCACHEPREFIX": str(compiled),
    }
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(ran.stdout)


def main(trees: list[Path], kinds: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Measure in turns, and print a table."""
    found: dict[str, dict[Path, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="lightning-bench-") as folder:
        for kind in kinds:
            with place(kind, Path(folder)) as url:
                for number in range(rounds):
                    for tree in trees if number % 2 == 0 else reversed(trees):
                        for name, value in measured(tree, url, Path(folder)).items():
                            found.setdefault(f"{kind}: {name}", defaultdict(list))[tree].append(value)
    medians = {name: [statistics.median(values[tree]) for tree in trees] for name, values in found.items()}
    table = {}
    for name, values in medians.items():
        table[name] = {"here": values[0]} | ({"there": values[1], "ratio": values[0] / values[1]} if values[1:] else {})
        sys.stdout.write(
            f"{name:<40}" + "".join(f"{key:>8} {value:>10,.2f}" for key, value in table[name].items()) + "\n"
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, help="the other checkout; without one this one is measured alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=KINDS, action="append", help="measure this only; may be repeated")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here is not None:
        with tempfile.TemporaryDirectory(prefix="lightning-bench-") as made:
            if given.here == "gateway":
                numbers = called()
            else:
                numbers = asyncio.run(stored(given.here) if given.here else started(Path(made)))
        sys.stdout.write(json.dumps(numbers))
    else:
        result = main([HERE, *([given.tree.resolve()] if given.tree else [])], given.only or list(KINDS), given.rounds)
        if given.json is not None:
            given.json.write_text(json.dumps(result, indent=2))
