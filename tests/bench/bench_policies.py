"""A policy for each agent beside one policy that all agents share.

    python tests/bench/bench_policies.py [updates] [cpu] [opposites] [sql] [--seeds N] [--out FOLDER] [--json FILE]

- `updates`: 50 updates under load while three agents call, of which one is answered by a frozen policy. vLLM is scripted and
  notes under which model name, and with which version, each token was sampled; every token of the record is held against this.
- `cpu`: CPU of the gateway's process for a call of a run with two policies, beside a run with one.
- `opposites`, `sql`: the demonstrations of these names, trained with one policy for all agents and with a policy for each, on
  the same seeds, with adapters of the same size and the same rate. In `sql` the checker is frozen in the second case; in the
  first its calls are not trained. Each run is a process of its own, and one whose result is in the folder is not made again.
  A real vLLM is asked, before and after each run, for the logprobs of a fixed text under the name of the base model: with a
  policy for each agent these may not change in a bit, which is what frozen means.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_gateway
import httpx
import lightning
import psutil
from bench_gateway import cpu_of_a_call, running, session, spread
from bench_replicas import World, world
from lightning.types import LLM, CallStatus, Run, Task

UPDATES, ROLLOUTS, TURNS = 50, 192, 4
"""Updates of `updates`, its rollouts, and the calls of each agent in a rollout."""
CALLS, ROUNDS = 600, 5
"""Calls of `cpu` in one of its rounds."""
STEPS, HELD_OUT = {"opposites": 6, "sql": 6}, {"opposites": 200, "sql": 100}
WAYS = ("shared", "policies")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "opposites": {"policies.low.agents": ["low"], "policies.high.agents": ["high"]},
    "sql": {
        "policies.write.agents": ["write"],
        "policies.rewrite.agents": ["rewrite"],
        "policies.check.agents": ["check"],
        "policies.check.train": False,
    },
}
"""The policies of each demonstration in the case `policies`."""
COMMON: Mapping[str, Mapping[str, Any]] = {
    "opposites": {},
    "sql": {"engine.lora.rank": 32, "engine.lr": 1e-2, "trainer.tasks_per_step": 8},
}
"""Settings of a demonstration in both cases."""
TEXT = "How many pens are there? The answer is 25. SELECT COUNT(*) FROM pens WHERE price > 40"
"""The text whose logprobs a vLLM is asked for before and after a run."""


# every token's policy and version -------------------------------------------------------------------------------------
PLAYERS = {"low": True, "high": True, "judge": False}
"""Each agent of `updates`, whose policy has the agent's name, and whether that policy is trained."""


async def players(task: Task, llm: LLM) -> float:
    """Agents that call at the same time, each with a conversation of its own."""

    async def play(player: str) -> None:
        messages = [{"role": "user", "content": f"task {task.input}: " + "a b c d " * 10}]
        for turn in range(TURNS):
            with lightning.component(player):
                body = {"model": llm.model, "messages": messages}
                answer = (await http.post(f"{llm.base_url}/chat/completions", json=body)).raise_for_status().json()
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and then {turn}?"}]

    async with httpx.AsyncClient(timeout=120, headers={"authorization": f"Bearer {llm.api_key}"}) as http:
        await asyncio.gather(*map(play, PLAYERS))
    return 1.0


async def judged(made: World) -> dict[str, int]:
    """Counts of calls and tokens, and of tokens whose recorded policy or version is wrong."""
    truth = made.servers[0].truth
    asked = {one.request_id: str(one.body["model"]) for server in made.servers for one in server.fake.requests}
    told = Counter({"wrong policy": 0, "wrong version": 0, "split": 0, "not answered": 0})
    for rollout in (await made.store.list_rollouts("run", limit=100_000)).items:
        for call in await made.store.transitions(rollout.id):
            if call.status is not CallStatus.OK:
                told["not answered"] += 1
                continue
            request, player = call.id.removeprefix("chatcmpl-"), call.caller.name
            _, _, adapter = asked[request].partition("/")
            trained, sampled = PLAYERS[player], truth[request]
            told.update({"calls": 1, f"tokens of {player}": len(sampled), "split": int(len(call.versions) > 1)})
            for place, version in enumerate(sampled):
                run = [run for run in call.versions if run.start <= place][-1]
                right = run.policy == player and adapter == (player if trained else "")
                told["wrong policy"] += not right
                told["wrong version"] += run.version != (version if trained else 0)
                told["tokens"] += 1
    return dict(told)


async def updates(seed: int) -> dict[str, Any]:
    """Update the weights under load, and hold every token of the record against the servers' notes."""
    policies = {name: {"agents": [name], "train": trained} for name, trained in PLAYERS.items()}
    run = Run("run", "run", config={"config": {"policies": policies}})
    async with AsyncExitStack() as resources:
        made = await world(resources, [0.01] * 2, seed, agent=players, run=run, policies=PLAYERS)
        working = asyncio.create_task(made.work(ROLLOUTS))
        for version in range(1, UPDATES + 1):
            await made.update(version)
            await asyncio.sleep(0.03)
        busy = not working.done()
        await working
        return {"updates": UPDATES, "under load to the end": busy, **await judged(made)}


# what a call costs ----------------------------------------------------------------------------------------------------
async def cpu(seed: int) -> dict[str, Any]:
    """Measure a gateway of each case in turns; the medians of all rounds."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        running("backend") as (behind, _),
        running("ours", behind.url) as (shared, _),
        running("policies", behind.url) as (several, _),
    ):
        servers = dict(zip(WAYS, (shared, several), strict=True))
        async with session() as http:
            for server in servers.values():
                await spread(16, bench_gateway.WARM, lambda number, to=server: bench_gateway.call(http, to, number))
            for _ in range(ROUNDS):
                for way in random.Random(seed).sample(WAYS, len(WAYS)):
                    found[way].append(await cpu_of_a_call(http, servers[way], 16, CALLS))
    return {way: {"cpu_ms": statistics.median(each), "rounds": each} for way, each in found.items()}


# a training of each case ----------------------------------------------------------------------------------------------
class Watched:
    """A policy server of a run, which notes the logprobs of `TEXT` under the base model's name after its start and before its
    end, and the memory of its processes."""

    def __init__(self, server: Any, ids: Sequence[int]) -> None:
        self._server, self._ids = server, ids
        self.found: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def start(self) -> None:
        await self._server.start()
        self.found["before"] = await self._logprobs()

    async def close(self) -> None:
        self.found |= {"after": await self._logprobs(), "vllm_mb": memory_of(self._server.pid)}
        await self._server.close()

    async def _logprobs(self) -> list[float]:
        return list(await self._server._running().served_logprobs(self._server.alias, self._ids))


def memory_of(pid: int) -> float:
    """The memory of a process and its children, in MB; what several of them share counts once (PSS)."""
    root = psutil.Process(pid)
    return sum(each.memory_full_info().pss for each in [root, *root.children(recursive=True)]) / 1e6


def train(name: str, way: str, seed: int, folder: Path) -> None:
    """One run; its result goes to `folder`."""
    from lightning import Trainer
    from lightning.config import Config, with_settings
    from lightning.plugins import plugins
    from lightning.policy_server.vllm_server import make_policy_server
    from transformers import AutoTokenizer

    demo = plugins().demo(name)()
    watched: list[Watched] = []
    ids = AutoTokenizer.from_pretrained(demo.model)(TEXT)["input_ids"]

    def made(*arguments: Any, **named: Any) -> Watched:
        watched.append(Watched(make_policy_server(*arguments, **named), ids))
        return watched[-1]

    settings = {key: value for key, value in demo.settings.items() if not key.startswith("policies.")}
    settings |= {"trainer.seed": seed, "trainer.steps": STEPS[name], **COMMON[name]}
    settings |= SETTINGS[name] if way == "policies" else {}
    agents = demo.train_agents if way == "shared" else ()
    trainer = Trainer(
        demo.model, demo.algorithm(), out=folder / "run", train_agents=agents, config=with_settings(Config(), settings)
    )
    with patch("lightning.trainer.stack.make_policy_server", made):
        summary = trainer.fit(demo.agent, demo.tasks(4000, seed), demo.val_tasks(HELD_OUT[name]))
    (server,) = watched
    gap = max(abs(a - b) for a, b in zip(server.found["before"], server.found["after"], strict=True))
    result = {
        "summary": summary.to_json(),
        "shares": shares(folder / "run" / "metrics.jsonl"),
        "base_gap": gap,
        "base_tokens": len(server.found["before"]),
        "trainer_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "vllm_mb": server.found["vllm_mb"],
        "load": os.getloadavg()[0],
    }
    (folder / "result.json").write_text(json.dumps(result))


def shares(metrics: Path) -> dict[str, list[float]]:
    """The share of each policy in the squared gradient of each step that trained it."""
    found: dict[str, list[float]] = {}
    for line in metrics.read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("policy/") and key.endswith("/gradient_share"):
                found.setdefault(key.split("/")[1], []).append(value)
    return found


def row(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is published of a run."""
    summary = result["summary"]
    ends = [summary["evaluations"][0], summary["evaluations"][-1]]
    seconds = [value for key, value in summary["time"].items() if key in ("rollout", "train", "update", "checkpoint")]
    return {
        "untrained": shown(ends[0]),
        "held_out": shown(ends[1]),
        "shares": {name: round(statistics.fmean(each), 3) for name, each in result["shares"].items()},
        "trained_tokens": summary["trained_tokens"],
        "drift_tokens": summary["drift_tokens"],
        "failed": summary["failed"],
        "base_gap": result["base_gap"],
        "seconds_a_step": round(sum(seconds) / summary["steps"], 2),
        "trainer_mb": round(result["trainer_mb"]),
        "vllm_mb": round(result["vllm_mb"]),
    }


def shown(evaluation: Mapping[str, Any]) -> str:
    """A held-out reward with its interval: Wilson's, which is rather too wide for rewards between 0 and 1."""
    from lightning_debug.statistics import share_interval

    low, high = share_interval(evaluation["reward"], evaluation["rollouts"])
    return f"{evaluation['reward']:.3f} ({low:.2f} to {high:.2f})"


def trained(name: str, seeds: int, folder: Path) -> dict[str, Any]:
    """Make the runs that are missing, one after the other, and return a row for each."""
    rows: dict[str, Any] = {}
    for seed in range(seeds):
        for way in WAYS:
            place = folder / f"{name}-{way}-{seed}"
            if not (place / "result.json").exists():
                place.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, __file__, "--out", str(folder), "--one", name, way, str(seed)]
                with (place / "log").open("w") as log:
                    subprocess.run(command, check=True, stdout=log, stderr=log)
            rows[f"{way} {seed}"] = row(json.loads((place / "result.json").read_text()))
            sys.stdout.write(f"{name}, {way}, seed {seed}: {json.dumps(rows[f'{way} {seed}'])}\n")
            sys.stdout.flush()
    return rows


PARTS = ("updates", "cpu", "opposites", "sql")


def main() -> None:
    """Measure what was asked for, print the numbers and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("DEMO", "CASE", "SEED"), help="one run alone, in this process")
    given = parser.parse_args()
    if given.one:
        name, way, seed = given.one
        train(name, way, int(seed), given.out / f"{name}-{way}-{seed}")
        return
    logging.disable(logging.ERROR)
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.parts or PARTS:
            began = time.monotonic()
            if name in STEPS:
                told[name] = trained(name, given.seeds, given.out or Path(scratch))
            else:
                told[name] = asyncio.run({"updates": updates, "cpu": cpu}[name](0))
            told[name]["seconds"] = round(time.monotonic() - began, 1)
            sys.stdout.write(f"{name}: {json.dumps(told[name])}\n")
    if given.json:
        given.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
