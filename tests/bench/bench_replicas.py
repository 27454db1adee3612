"""Several policy servers under load: calls of each, prefix caches, the version of every token, and servers that are killed.

    python tests/bench/bench_replicas.py [balance] [versions] [kills] [prefixes] [--seed N] [--json FILE]

vLLM is scripted and notes which version sampled each token (`tests.servers.replica`); gateway, stack, store and placement are
the real ones. An agent makes six calls, each of which continues the one before.

- `balance`: calls of each of four equal servers, and of one that is three times as slow as the three others.
- `versions`: 100 updates under load with four servers, in one hold and one server after another; every token is held against
  the truth.
- `kills`: 50 kills of two servers under load, with updates in between; rollouts that were lost and tokens with a wrong version.
- `prefixes`: the share of prompt tokens that a prefix cache of blocks of 32 finds with four servers and with one, for groups of
  eight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import httpx
from lightning.config import config_model, with_settings
from lightning.runner.inline import InlineRunner
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import Reply
from lightning.trainer.stack import Stack, open_stack
from lightning.types import LLM, CallStatus, Rollout, Run, Status, Task

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.servers.replica import Replica

CALLS, GROUP, BLOCK = 6, 8, 32
CONCURRENCY = 32
BALANCED, ROLLOUTS, IN_GROUPS = 192, 320, 160
"""Rollouts of `balance`, of each half of `versions`, and of `prefixes`."""
UPDATES, KILLS = 100, 50
RUN = Run("run", "run")


@dataclass
class World:
    """A stack over scripted servers, with agents at work on all rollouts."""

    stack: Stack
    servers: list[Replica]
    store: MemoryStore
    folder: Path
    cached: list[tuple[int, int]] = field(default_factory=list)

    async def work(self, rollouts: int, first: int = 0) -> None:
        made = [
            Rollout(f"run/1/{number}", "run", Task(number // GROUP), f"g{number // GROUP}", step=1, max_attempts=3)
            for number in range(first, first + rollouts)
        ]
        await self.stack.execute(made, lambda rollout: None)

    async def update(self, version: int) -> None:
        file = self.folder / f"version-{version}"
        file.touch()
        await self.stack.update(file, version)

    async def verdict(self) -> dict[str, int]:
        """Counts of rollouts and tokens, and of those that are wrong."""
        rollouts = (await self.store.list_rollouts("run", limit=100_000)).items
        truth = self.servers[0].truth
        told = {"rollouts": len(rollouts), "lost": 0, "calls": 0, "split": 0, "tokens": 0, "wrong": 0, "untrained": 0}
        told["lost"] = sum(rollout.status is not Status.SUCCEEDED for rollout in rollouts)
        for rollout in rollouts:
            for call in await self.store.transitions(rollout.id):
                if call.status is not CallStatus.OK:
                    told["untrained"] += 1
                    continue
                sampled = truth[call.id.removeprefix("chatcmpl-")]
                places = range(len(call.response_ids))
                believed = [[run.version for run in call.versions if run.start <= at][-1] for at in places]
                told["calls"] += 1
                told["split"] += len(call.versions) > 1
                told["tokens"] += len(believed)
                told["wrong"] += sum(a != b for a, b in zip(believed, sampled, strict=True))
        return told


async def agent(task: Task, llm: LLM) -> float:
    """Six calls of a conversation. A call whose server went away is an error, after which the attempt is made again."""
    messages = [{"role": "user", "content": f"task {task.input}: " + "a b c d " * 40}]
    async with httpx.AsyncClient(timeout=120, headers={"authorization": f"Bearer {llm.api_key}"}) as http:
        for turn in range(CALLS):
            body = {"model": llm.model, "messages": messages}
            answer = (await http.post(f"{llm.base_url}/chat/completions", json=body)).raise_for_status().json()
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and then {turn}?"}]
    return 1.0


def script(rng: random.Random, delay: float) -> Callable[[Mapping[str, Any]], Reply]:
    def reply(body: Mapping[str, Any]) -> Reply:
        return Reply(" ".join("x" * rng.randrange(4, 12)), token_delay=delay)

    return reply


async def world(
    resources: AsyncExitStack,
    delays: list[float],
    seed: int,
    *,
    agent: Callable[[Task, LLM], Any] = agent,
    run: Run = RUN,
    policies: Mapping[str, bool] = MappingProxyType({}),
    **settings: Any,
) -> World:
    """Open a stack over servers that take these seconds for each token. `policies` are those that answer there, each with
    whether it is trained."""
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    store = MemoryStore()
    await store.open()
    resources.push_async_callback(store.close)
    await store.put_run(run)
    rng, truth = random.Random(seed), dict[str, list[int]]()
    servers = [
        Replica(script(rng, delay), load_seconds=0.02, start_seconds=0.2, truth=truth, policies=policies)
        for delay in delays
    ]
    left = iter(servers)
    given = {"runner.concurrency": CONCURRENCY, "policy_server.replicas": len(delays), "policy_server.device": "cpu"}
    config = with_settings(
        config_model()(), given | {name.replace("__", "."): value for name, value in settings.items()}
    )
    with patch("lightning.trainer.stack.make_policy_server", lambda *_, **__: next(left)):
        stack = await open_stack(
            resources,
            run=run,
            config=config,
            folder=folder,
            model=folder,
            store=store,
            runner=InlineRunner(agent, config.runner),
            restores=False,
        )
    return World(stack, servers, store, folder)


async def balance(seed: int) -> dict[str, Any]:
    told = {}
    for name, delays in (("equal", [0.08] * 4), ("one is slow", [0.08, 0.08, 0.08, 0.24])):
        async with AsyncExitStack() as resources:
            made = await world(resources, delays, seed)
            await made.work(BALANCED)
            calls = [server.requests for server in made.servers]
            mean = sum(calls) / len(calls)
            told[name] = {"calls": calls, "largest difference": max(abs(count / mean - 1) for count in calls)}
    return told


async def versions(seed: int) -> dict[str, Any]:
    told = {}
    for name, staleness in (("held", 0), ("one after another", 1)):
        async with AsyncExitStack() as resources:
            made = await world(resources, [0.01] * 4, seed, trainer__max_staleness=staleness)
            working = asyncio.create_task(made.work(ROLLOUTS))
            for version in range(1, UPDATES + 1):
                await made.update(version)
                await asyncio.sleep(0.03)
            busy = not working.done()
            await working
            told[name] = {"updates": UPDATES, "under load to the end": busy, **await made.verdict()}
    return told


async def kills(seed: int) -> dict[str, Any]:
    async with AsyncExitStack() as resources:
        made = await world(resources, [0.01] * 2, seed, trainer__max_staleness=1, runner__max_attempts=3)
        rng, killed, version = random.Random(seed), 0, 0

        async def work() -> None:
            begun = 0
            while killed < KILLS:
                await made.work(64, begun)
                begun += 64

        working = asyncio.create_task(work())
        while killed < KILLS and not working.done():
            if made.stack.complete:
                await rng.choice(made.servers).kill()
                killed += 1
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            if rng.random() < 0.5:
                version += 1
                await made.update(version)
        await working
        told = {"kills": killed, "updates": version, "restarts": made.stack.restarts}
        return {**told, **await made.verdict(), "versions": [server.version for server in made.servers]}


def hits(prompts: list[tuple[str, ...]]) -> tuple[int, int]:
    """Return the words of prompts of one server, and those of them that a cache of whole blocks had."""
    known: set[tuple[str, ...]] = set()
    total = found = 0
    for words in prompts:
        blocks = [words[: end + BLOCK] for end in range(0, len(words) - BLOCK + 1, BLOCK)]
        total += len(words)
        found += BLOCK * next((number for number, block in enumerate(blocks) if block not in known), len(blocks))
        known.update(blocks)
    return total, found


async def prefixes(seed: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for count in (1, 4):
        async with AsyncExitStack() as resources:
            made = await world(resources, [0.0] * count, seed)
            await made.work(IN_GROUPS)
            each = [
                hits([tuple(json.dumps(call.body["messages"]).split()) for call in server.fake.requests])
                for server in made.servers
            ]
            told[f"{count} servers"] = sum(found for _, found in each) / sum(total for total, _ in each)
    told["share of one server's"] = told["4 servers"] / told["1 servers"]
    return told


PARTS = {part.__name__: part for part in (balance, versions, kills, prefixes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # of killed servers, and of calls that they cut off
    told = {}
    for name in given.parts or PARTS:
        began = time.monotonic()
        told[name] = asyncio.run(PARTS[name](given.seed)) | {"seconds": round(time.monotonic() - began, 1)}
        sys.stdout.write(f"{name}: {json.dumps(told[name])}\n")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
