"""The trainer's cost of rollouts whose calls continue one another: memory and CPU of a step, without the engine.

Each rollout makes `--calls` calls whose prompts grow to `--tokens` tokens. Measured are the reading of an attempt's calls at
its end, and a step: the groups' calls are read, become rows, are compared with what the engine saw, and become the digests of
the step's record. *Naive* unpacks every call into arrays of its own, and reads the calls again to compare them.
`--before COMMIT` measures the code of an earlier commit, too. Each way runs in processes of its own, one for CPU and one for
memory.

    python tests/bench/bench_long_rollouts.py [--json FILE] [--rollouts 8] [--calls 40] [--tokens 65536] [--before COMMIT]
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from lightning import LightningRL
from lightning.batch.sample import span_digest
from lightning.store.sqlite import SqliteStore
from lightning.trainer.loop import Loop
from lightning.trainer.training_data import load_groups, record_step
from lightning.types import Outcome, Rollout, Run, Task, Transition, VersionRun, logprobs, token_ids

RUN: Final = "run"
GROUP: Final = 4
"""Rollouts of a task. They begin with the same prompt."""
ANSWER: Final = 256
"""Tokens of a response."""
AT_END, STEP = "reading an attempt at its end", "a step"


async def fill(store: SqliteStore, given: argparse.Namespace) -> None:
    """Store the rollouts, with calls of random ids."""
    random = np.random.default_rng(0)
    await store.put_run(Run(RUN, RUN))
    names = [f"{RUN}/{n}" for n in range(given.rollouts)]
    await store.create_rollouts(
        [Rollout(name, RUN, Task("q"), f"g{n // GROUP}", 1, index=n % GROUP) for n, name in enumerate(names)]
    )
    leases = await store.lease(RUN, "w", limit=given.rollouts)
    turn = given.tokens // given.calls
    system = random.integers(0, 150_000, turn - ANSWER).tolist()
    for n, lease in enumerate(leases):
        prompt = list(system)
        for seq in range(given.calls):
            answer = random.integers(0, 150_000, ANSWER).tolist()
            values = logprobs((-random.exponential(1.0, ANSWER)).tolist())
            key = (lease.rollout.id, lease.attempt, seq)
            call = Transition(*key, f"{n}-{seq}", token_ids(prompt), token_ids(answer), values)
            await store.append([replace(call, versions=(VersionRun(0, 0),))])
            prompt += answer + random.integers(0, 150_000, turn - ANSWER).tolist()
        await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=float(n % 2)))


class Naive:
    """A store whose calls have arrays of their own."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transitions(self, *attempt: Any) -> list[Transition]:
        """The calls of an attempt."""
        return (await self.transitions_of([attempt]))[0]

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """The calls of each attempt."""
        return [[_apart(call) for call in calls] for calls in await self._store.transitions_of(attempts)]


def _apart(call: Transition) -> Transition:
    ids = [token_ids(values.tobytes()) for values in (call.prompt_ids, call.response_ids)]
    return replace(call, prompt_ids=ids[0], response_ids=ids[1], logprobs=logprobs(call.logprobs.tobytes()))


async def at_end(store: Any, rollouts: Sequence[Rollout], *, again: bool) -> None:
    """Read the calls of each attempt, as its end does, which judges the outcome by them."""
    for rollout in rollouts:
        await store.transitions(rollout.id, rollout.attempt)


async def step(store: Any, rollouts: Sequence[Rollout], *, again: bool) -> None:
    """Do what the loop does for a step, but for the engine's part; with `again` as before calls were passed on."""
    groups = await load_groups(store, rollouts, ())
    batch = LightningRL(group_size=GROUP).batch(groups)
    assert len(batch.used) == len(rollouts)
    assert len(batch.samples) == len(rollouts)
    seen = {
        (span.rollout, span.attempt, span.seq): span_digest(
            row.ids[span.start : span.stop], row.logprobs[span.start : span.stop]
        )
        for row in batch.samples
        for span in row.spans
    }
    result: Any = SimpleNamespace(metrics={}, seen=seen)
    loop: Any = SimpleNamespace(stack=SimpleNamespace(store=store))
    if "groups" in inspect.signature(Loop.drift).parameters:
        if again:
            await store.transitions_of([(rollout.id, rollout.attempt) for rollout in batch.used])
        assert not Loop.drift(loop, groups, batch, result)
    else:  # an earlier commit, which reads the calls again itself
        drift: Any = Loop.drift
        assert not await drift(loop, batch, result)
    assert record_step(RUN, 1, groups, batch, checkpoint="", metrics={}, context={}).digests


PARTS: Final[dict[str, Callable[..., Any]]] = {AT_END: at_end, STEP: step}


async def measure(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures for a rollout: CPU milliseconds, the best of `--repeats`, or bytes at most and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        plain = SqliteStore(Path(folder) / "store.db")
        await plain.open()
        await fill(plain, given)
        store: Any = Naive(plain) if given.way == "naive" else plain
        rollouts = (await plain.list_rollouts(RUN)).items
        found: dict[str, dict[str, float]] = {}
        for name, part in PARTS.items():
            await part(store, rollouts[:GROUP], again=given.way == "naive")  # imports, and caches of SQLite
            if given.memory:
                tracemalloc.start()
                await part(store, rollouts, again=given.way == "naive")
                found[name] = {"peak_mb": tracemalloc.get_traced_memory()[1] / len(rollouts) / 1e6}
                tracemalloc.stop()
                continue
            best = float("inf")
            for _ in range(given.repeats):
                began = time.process_time()
                await part(store, rollouts, again=given.way == "naive")
                best = min(best, time.process_time() - began)
            found[name] = {"cpu_ms": best / len(rollouts) * 1e3}
        await plain.close()
    return found


def in_process(given: argparse.Namespace, way: str, *, memory: bool, code: Path | None = None) -> dict[str, Any]:
    """Measure in a process of its own, with the `code` of another checkout if one is given."""
    path = os.pathsep.join([str(code / "core"), *map(str, (code / "plugins").iterdir())]) if code else ""
    asked = ["--rollouts", given.rollouts, "--calls", given.calls, "--tokens", given.tokens, "--repeats", given.repeats]
    command = [sys.executable, __file__, *map(str, asked), "--way", way, *(["--memory"] if memory else [])]
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


def main(given: argparse.Namespace) -> None:
    """Measure each way, print and keep the figures."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Path | None] = {"ours": None, "naive": None}
        if given.before:
            archive = subprocess.run(
                ["git", "archive", given.before, "core", "plugins"],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                check=True,
            )
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            ways[given.before] = Path(folder)
        for way, code in ways.items():
            cpu, memory = (in_process(given, way, memory=traced, code=code) for traced in (False, True))
            found[way] = {part: {**cpu[part], **memory[part]} for part in cpu}
            for part, figures in found[way].items():
                sys.stdout.write(
                    f"{way:10} {part:32} {figures['cpu_ms']:7.1f} CPU ms {figures['peak_mb']:7.2f} MB a rollout\n"
                )
    if given.json:
        settings = {**vars(given), "json": str(given.json)}
        given.json.write_text(json.dumps({"settings": settings, "found": found}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", default="")
    parser.add_argument("--way", default="")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.way:
        sys.stdout.write(json.dumps(asyncio.run(measure(arguments))))
    else:
        main(arguments)
