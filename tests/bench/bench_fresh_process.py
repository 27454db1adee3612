"""A fresh process for each rollout beside processes that are used again: the same rollouts, wall time and CPU of both.

The agents are the demonstrations' (AutoGen's `AssistantAgent` and plain Python), the model is a server of canned answers on
loopback, so that nearly all of the time is the agents' own. With a real model a rollout takes seconds besides.

    python tests/bench/bench_fresh_process.py [--rollouts 200] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time

from lightning.config import RunnerConfig
from lightning.plugins import plugins
from lightning.runner.process import ProcessRunner
from lightning.testing.chat_server import ChatServer
from lightning.types import Lease, Rollout

DEMOS = ("tiny", "math", "calculator")
KINDS = {"reused": 1000, "fresh": 1}
WARMING = 3.0
"""Seconds in which the processes that are begun ahead come up."""


async def measure(demo: str, per_process: int, rollouts: int) -> tuple[float, float]:
    """Wall seconds and CPU seconds of the agents' processes, for each rollout; the first ones of each process are left out."""
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
        began, before = time.perf_counter(), _cpu()
        await asyncio.gather(*map(one, range(16, 16 + rollouts)))
        wall = time.perf_counter() - began
        await runner.close()
        await asyncio.sleep(0.5)
        return wall / rollouts, (_cpu() - before) / rollouts


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
            sys.stdout.write(
                f"{demo:10}  {what:4}  reused {reused:.1f} ms a rollout, fresh {fresh:.1f} ms: "
                f"{fresh - reused:+.1f} ms, {fresh / reused:.2f} times\n"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
