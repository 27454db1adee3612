"""How many rollouts `lightning ab` takes to tell two prompts apart whose difference is known, beside a test of a fixed size.

The whole way is taken (agent, gateway, store, pairs, sequential test), with a scripted vLLM that answers rightly with a
probability that the prompt decides. A test of a fixed size is the paired z-test at the same level, 5 % two-sided; its size is
what it takes to find a difference with a given power. How often the sequential test alarms without a difference is simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import lightning
import numpy as np
from lightning.config import Config, with_settings
from lightning.policy_server.protocol import Usage
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.trainer.summary import Reporter
from lightning.types import LLM, Task
from lightning_branching.policies import EvaluatedModel
from lightning_debug.ab import compare, shuffled
from lightning_debug.evaluate import Setup, Variant
from lightning_debug.statistics import SequentialTest

RATES = {"Guess: ": 0.5, "Think, then say: ": 0.8}
"""The probability of a right answer under each prompt."""
SMALLEST = 0.15
"""The difference that a test would be planned for: the smallest that is worth to know. The true one is twice as large."""
POWERS = (0.8, 0.9, 0.95, 0.99)
SEQUENCES = 2000
"""Simulated, to know the power of the sequential test."""

writer = lightning.component("writer", prompt="{question}")


async def agent(task: Task, llm: LLM) -> float:
    """One call; right or wrong."""
    with writer:
        content = writer.prompt.format(question=task.input)
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(
        headers=headers, verify=False
    ) as client:  # certificates take longer to load than all else
        reply = await client.post(f"{llm.base_url}/chat/completions", json=body)
    return float(reply.raise_for_status().json()["choices"][0]["message"]["content"] == "right")


class ScriptedVLLM:
    """Answers rightly with the probability that the prompt decides."""

    version, claim = 0, ""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fake = FakeVLLM(script=self._answer)

    def _answer(self, body: Mapping[str, Any]) -> Reply:
        content = str(body["messages"][-1]["content"])
        (rate,) = [rate for prompt, rate in RATES.items() if content.startswith(prompt)]
        return Reply("right" if self._rng.random() < rate else "wrong")

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._fake.url

    @property
    def model(self) -> str:
        """What it calls its model."""
        return self._fake.model

    alias = model
    models = ()

    async def start(self) -> None:
        """Listen."""
        await self._fake.start()

    async def usage(self) -> Usage:
        """Nothing is measured."""
        return Usage()

    async def wait_died(self) -> None:
        """It does not die."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop."""
        await self._fake.close()


def fixed_size(difference: float, power: float, base: float) -> int:
    """Pairs that a paired z-test of level 5 % needs to find a difference from a success rate of `base`."""
    normal, other = statistics.NormalDist(), base + difference
    variance = base * (1 - base) + other * (1 - other)
    return math.ceil((normal.inv_cdf(0.975) + normal.inv_cdf(power)) ** 2 * variance / difference**2)


async def once(seed: int, pairs: int, folder: Path) -> tuple[int, str]:
    """One comparison: how many rollouts it took, and who won."""
    config = with_settings(
        Config(),
        {"policy_server.dtype": "float32", "engine.dtype": "float32", "trainer.seed": seed, "runner.concurrency": 16},
    )
    tasks = shuffled([Task(f"question {number}") for number in range(pairs)], seed)
    setup = Setup(agent, "bench_ab:agent", tasks, 1, "inline", folder)
    model = EvaluatedModel("scripted", folder)
    sides = [
        Variant(f"bench.{side}", model, config, ("writer", f"{prompt}{{question}}"), prompt)
        for side, prompt in zip("ab", RATES, strict=True)
    ]
    reporter = Reporter(enabled=False)
    with patch("lightning.trainer.stack.make_policy_server", lambda *_, **__: ScriptedVLLM(seed)):
        found = await compare(setup, *sides, bounds=(0.0, 1.0), batch=4, limit=0, reporter=reporter)
    return found.rollouts, found.better


def decided(sequences: int, pairs: int, base: float, other: float) -> float:
    """How often the test decides within so many pairs for two success rates, looked at after every four."""
    rng, found = np.random.default_rng(0), 0
    with patch("lightning_debug.statistics.CANDIDATES", 3):
        for _ in range(sequences):
            test = SequentialTest(-1.0, 1.0)
            while test.count < pairs and not test.decided:
                test.add(((rng.random(4) < other).astype(float) - (rng.random(4) < base)).tolist())
            found += test.decided != 0
    return found / sequences


def main() -> None:
    """Print the figures, and keep them as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=20)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    low, high = RATES.values()
    planned = fixed_size(SMALLEST, 0.9, low)
    used, won = [], []
    for seed in range(given.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            rollouts, better = asyncio.run(once(seed, planned, Path(folder)))
        used.append(rollouts)
        won.append(better)
    mean, alarms = statistics.mean(used), decided(400, planned, (low + high) / 2, (low + high) / 2)
    # Of the power only so much is sure: with none missed of n, it is at least 1 - 3/n with a confidence of 95 %.
    power = min(decided(SEQUENCES, planned, low, high), 1 - 3 / SEQUENCES)
    sizes = {f"{power:.4g}": 2 * fixed_size(high - low, power, low) for power in (*POWERS, power)}
    table = {
        "rates": [low, high],
        "repetitions": given.repetitions,
        "rollouts": {"mean": mean, "median": statistics.median(used), "least": min(used), "most": max(used)},
        "won": {"B": won.count("B"), "A": won.count("A"), "not told apart": won.count("")},
        "planned": 2 * planned,
        "ratio_to_planned": mean / (2 * planned),
        "fixed_size_for_the_true_difference": sizes,
        "ratio_by_power": {name: mean / size for name, size in sizes.items()},
        "power": power,
        "false_alarms": alarms,
    }
    say = sys.stdout.write
    say(f"success rates {low} and {high}, {given.repetitions} comparisons: the better one won {won.count('B')} times, ")
    say(f"the worse one {won.count('A')} times\n")
    say(f"rollouts until decided: {mean:.0f} (median {statistics.median(used):.0f}, {min(used)} to {max(used)})\n")
    say(
        f"{mean / (2 * planned):.2f} of the {2 * planned} of a test planned for a difference of {SMALLEST} (power 90 %)\n"
    )
    for name, size in sizes.items():
        say(f"{mean / size:.2f} of the {size} of a test planned for the true difference with a power of {name}\n")
    say(f"of {SEQUENCES} simulated sequences it decides so many: {power:.4g} (at least, the last of those powers)\n")
    say(f"false alarms without a difference: {alarms:.1%} of 400 simulated sequences of {planned} pairs\n")
    if given.json:
        given.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
