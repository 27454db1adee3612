"""A fresh process for each rollout beside processes that are used again: the same rollouts, wall time and CPU of both.

The start of the fork server and the first rollouts, which it learns from, are left out of both.

The agents are the demonstrations' (AutoGen's `AssistantAgent` and plain Python), the model is a server of canned answers on
loopback, so that nearly all of the time is the agents' own. With a real model a rollout takes seconds besides.

    python tests/bench/bench_fresh_process.py [--rollouts 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import psutil
from lightning.config import RunnerConfig
from lightning.plugins import plugins
from lightning.runner.process import ProcessRunner
from lightning.testing.chat_server import ChatServer
from lightning.types import Lease, Rollout

DEMOS = ("tiny", "math", "calculator")
KINDS = {"reused": 1000, "fresh": 1}
WARMING = 3.0
"""Seconds in which the fork server learns what the first rollout needed."""
ENDING = 0.5
"""Seconds in which the last processes end and are counted."""


async def measure(demo: str, per_process: int, rollouts: int) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of the agents' processes and their fork server, for each rollout."""
    chosen = plugins().demo(demo)()
    tasks = chosen.tasks(rollouts + 16, 0)
    runner = ProcessRunner(chosen.agent, RunnerConfig(concurrency=8, rollouts_per_process=per_process, timeout=120))
    with ChatServer(answer=lambda call: "Answer: 5") as server:
        await runner.start()

        async def one(number: int) -> None:
            lease = Lease(Rollout(str(number), "run", tasks[number], "g", attempt=1), "w", 0.0)
            await runner.run(lease, server.llm(f"key-{number}"))

        await asyncio.gather(*map(one, range(8)))
        await asyncio.sleep(WARMING)
        await asyncio.gather(*map(one, range(8, 16)))
        await asyncio.sleep(ENDING)
        began, before = time.perf_counter(), _cpu(runner)
        await asyncio.gather(*map(one, range(16, 16 + rollouts)))
        wall = time.perf_counter() - began
        await asyncio.sleep(ENDING)
        used = _cpu(runner) - before
        await runner.close()
        return wall / rollouts, used / rollouts


def _cpu(runner: ProcessRunner) -> float:
    """CPU seconds of the fork server, of its living children, and of those that have ended."""
    assert runner._server is not None
    assert runner._server._process is not None
    server = psutil.Process(runner._server._process.pid)
    used = [each.cpu_times() for each in (server, *server.children())]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in used))


def main() -> None:
    """Print both kinds side by side, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for demo in DEMOS:
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for _ in range(asked.rounds):
            for kind, per_process in KINDS.items():
                found[kind].append(asyncio.run(measure(demo, per_process, asked.rollouts)))
        for index, what in enumerate(("wall", "CPU")):
            reused, fresh = (1000 * statistics.median(each[index] for each in found[kind]) for kind in KINDS)
            ratio = f"{fresh / reused:.2f} times" if reused else "too few rollouts for the clock"
            sys.stdout.write(
                f"{demo:10}  {what:4}  reused {reused:.1f} ms a rollout, fresh {fresh:.1f} ms: "
                f"{fresh - reused:+.1f} ms, {ratio}\n"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
