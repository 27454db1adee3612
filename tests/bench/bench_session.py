"""Three training loops of one's own over the same agents and engine: each call awaited behind the one before, the next
rollouts asked for one step ahead, and a stream of groups as they complete.

Agents, policy server and engine are those of `bench_async.py`: a real engine (a tiny Qwen3 on a CPU), a scripted policy server,
and agents whose tool sleeps for a time drawn from a lognormal distribution. Overlap are the seconds in which agents ran and the
engine trained, as the steps' metric `overlap_seconds` has it. Useful tokens are those in the loss of a committed step.

    python tests/bench/bench_session.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import bench_async
from lightning.batch import Group
from lightning.testing.tiny_models import make_tiny_model
from lightning.types import Task
from lightning_session.session import Session

STEPS, REPEATS = 12, 1


def tasks() -> Iterator[Task]:
    """Tasks without an end."""
    return (Task(f"question {number}") for number in itertools.count())


async def train(session: Session, groups: Sequence[Group]) -> None:
    """Take a step."""
    batch = await session.batch(groups)
    await session.forward_backward(batch)
    await session.optim_step(lr=1e-6)
    await session.publish()


async def behind(session: Session) -> None:
    """Await each call behind the one before."""
    source = tasks()
    while session.step < STEPS:
        await train(session, await session.rollout([*itertools.islice(source, bench_async.TASKS_PER_STEP)]))


async def ahead(session: Session) -> None:
    """Ask for the rollouts of the next step before this one is trained."""
    source = tasks()

    def begin() -> asyncio.Task[list[Group]]:
        return asyncio.create_task(session.rollout([*itertools.islice(source, bench_async.TASKS_PER_STEP)]))

    following = begin()
    while session.step < STEPS:
        groups, following = await following, begin()
        await train(session, groups)
    following.cancel()


async def stream(session: Session) -> None:
    """Train on groups as they complete."""
    ready: list[Group] = []
    async with aclosing(session.stream(tasks(), ahead=2 * bench_async.TASKS_PER_STEP)) as groups:
        async for group in groups:
            ready.append(group)
            if len(ready) == bench_async.TASKS_PER_STEP:
                await train(session, ready)
                ready = []
            if session.step == STEPS:
                break


WAYS: dict[str, tuple[Callable[[Session], Awaitable[None]], int]] = {
    "behind": (behind, 0),
    "ahead": (ahead, 1),
    "stream": (stream, 2),
}
"""The loops, each with its `trainer.max_staleness`."""


async def measure(folder: Path, model: Path, way: str, seed: int) -> dict[str, float]:
    """Run a loop, and read from the store what came of it."""
    loop_of_ones_own, bound = WAYS[way]
    async with AsyncExitStack() as resources:
        loop = await bench_async.open_loop(resources, folder, model, bound, seed)
        began = time.perf_counter()
        async with Session(loop) as session:
            await loop_of_ones_own(session)
            seconds = time.perf_counter() - began
        await bench_async.prove(loop)
        steps = [point.values for point in await loop.stack.store.metrics("run") if point.step]
    return {
        "useful_tokens_per_second": sum(step["tokens"] for step in steps) / seconds,
        "seconds_per_step": seconds / len(steps),
        "engine_seconds": sum(step["seconds/train"] for step in steps),
        "overlap_seconds": sum(step["overlap_seconds"] for step in steps),
        "staleness_mean": statistics.mean(step.get("staleness_mean", 0.0) for step in steps),
        "groups_too_old": sum(step.get("groups_too_old", 0.0) for step in steps),
    }


async def main(out: Path | None = None) -> dict[str, float]:
    """Measure, print a table, write JSON to `out`."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        model = await asyncio.to_thread(make_tiny_model, Path(name) / "model", vocab=32_000)
        for repeat in range(REPEATS):
            for way in WAYS:  # in turn, so that a busy machine slows all of them
                folder = Path(name) / f"{way}-{repeat}"
                folder.mkdir()
                runs[way].append(await measure(folder, model, way, seed=repeat))
    found = {
        f"{way}_{key}": statistics.median(run[key] for run in mine) for way, mine in runs.items() for key in mine[0]
    }
    rates = {way: found[f"{way}_useful_tokens_per_second"] for way in WAYS}
    found |= {f"{way}_ratio": rate / rates["behind"] for way, rate in rates.items()}
    sys.stdout.write("".join(f"{name:<40}{value:>16,.6g}\n" for name, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    asyncio.run(main(parser.parse_args().json))
