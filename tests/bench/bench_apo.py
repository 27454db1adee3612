"""How far APO's search gets with a budget of rollouts, by the way it selects prompts.

No model: a prompt is a set of instructions, of which some help, some do nothing and some harm; a rollout succeeds with the
probability that they add up to; the scripted optimiser model adds an instruction, drops one, or answers something useless. So
the true success rate of every prompt is known, and a search can be repeated many times in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning.types import Json, Rollout, Status, Task
from lightning_prompts import BudgetSpentError, Trial
from lightning_prompts.apo import APO
from lightning_prompts.protocol import Messages
from lightning_resources.nouns import Resource

WORTH = (0.2, 0.15, 0.15, 0.1, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0, -0.05, -0.1, -0.1, -0.15)
"""What each instruction adds to the probability of success."""
BASE = 0.15
USELESS = 0.25
"""Share of answers that are no usable template."""
BUDGET = 1200


def rate(text: str) -> float:
    """The true success rate of a prompt."""
    return min(1.0, max(0.0, BASE + sum(WORTH[int(word[1:])] for word in text.split() if word[0] == "i")))


@dataclass
class Simulation:
    """A bench without a house: rollouts are coin tosses."""

    seed: int
    train: Sequence[Task]
    val: Sequence[Task]
    made: int = 0
    versions: list[Resource] = field(default_factory=lambda: [Resource("p", "{task}", version=1)])
    memory: dict[str, Json] = field(default_factory=dict)

    @property
    def start(self) -> Resource:
        """See `Bench.start`."""
        return self.versions[0]

    async def run(self, trials: Sequence[Trial], *, reserve: int = 0) -> list[list[Rollout]]:
        """See `Bench.run`."""
        wanted = sum(len(trial.tasks) for trial in trials)
        if self.made + wanted + reserve > BUDGET:
            raise BudgetSpentError(f"{wanted} more do not fit")
        self.made += wanted
        return [self._rollouts(trial) for trial in trials]

    def _rollouts(self, trial: Trial) -> list[Rollout]:
        rng = random.Random(f"{self.seed}/{trial.key}/{trial.version}")
        success = rate(str(self.versions[trial.version - 1].content))
        made = []
        for place, task in enumerate(trial.tasks):
            name = f"{trial.key}/{trial.version}/{place}"
            reward = float(rng.random() < success)
            made.append(Rollout(name, "run", task, name, status=Status.SUCCEEDED, attempt=1, reward=reward))
        return made

    async def ask(self, key: str, messages: Messages) -> str:
        """See `Bench.ask`."""
        text = messages[0]["content"]
        rng = random.Random(f"{self.seed}/{key}")
        if "<review>" not in text or rng.random() < USELESS:
            return "It could be better."
        words = text.partition("<template>\n")[2].partition("\n</template>")[0].split()
        if len(words) > 1 and rng.random() < 0.25:
            words.remove(rng.choice(words[1:]))
        else:
            words.append(rng.choice([f"i{n}" for n in range(len(WORTH)) if f"i{n}" not in words] or ["i0"]))
        return f"<prompt>{' '.join(words)}</prompt>"

    async def keep(self, text: str, metadata: Mapping[str, Json]) -> Resource:
        """See `Bench.keep`."""
        known = next((item for item in self.versions if item.content == text), None)
        if known is None:
            known = Resource("p", text, metadata=metadata, version=len(self.versions) + 1)
            self.versions.append(known)
        return known

    async def get(self, version: int) -> Resource:
        """See `Bench.get`."""
        return self.versions[version - 1]

    async def transcript(self, rollout: Rollout) -> str:
        """See `Bench.transcript`."""
        return ""

    async def recall(self, key: str) -> Json:
        """See `Bench.recall`."""
        return self.memory.get(key)

    async def remember(self, key: str, value: Json) -> None:
        """See `Bench.remember`."""
        self.memory[key] = value

    async def report(self, step: int, metrics: Mapping[str, float], line: str) -> None:
        """Nobody watches."""


METHODS = {
    "ucb, 32 a round": APO("p", rounds=99),
    "evenly, 32 a round": APO("p", rounds=99, exploration=1e9),
    "successive_rejects, 32 a round": APO("p", rounds=99, selection="successive_rejects"),
    "ucb, 128 a round": APO("p", rounds=99, selection_rollouts=128),
}
"""An exploration without end draws every prompt equally often."""


def measure(seeds: int) -> dict[str, dict[str, float]]:
    """For each way of selecting: the true success rate before and after, and the rollouts it took."""
    train, val = [Task(f"t{n}") for n in range(100)], [Task(f"v{n}") for n in range(32)]
    table = {}
    for name, apo in METHODS.items():
        after, spent = [], []
        for seed in range(seeds):
            bench = Simulation(seed, train, val)
            after.append(rate(str(asyncio.run(apo.tune(bench)).content)))
            spent.append(bench.made)
        table[name] = {
            "before": BASE,
            "after": statistics.mean(after),
            "deviation": statistics.stdev(after),
            "worst": min(after),
            "rollouts": statistics.mean(spent),
        }
    return table


def main() -> None:
    """Print the table, and keep it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=40)
    given = parser.parse_args()
    table = measure(given.seeds)
    sys.stdout.write(
        f"true success rate, {given.seeds} searches each, at most {BUDGET} rollouts; the best possible is {best():.2f}\n"
    )
    for name, row in table.items():
        sys.stdout.write(
            f"{name:32} {row['before']:.2f} -> {row['after']:.3f} ± {row['deviation']:.3f} (worst {row['worst']:.2f}), "
            f"{row['rollouts']:.0f} rollouts\n"
        )
    if given.json:
        given.json.write_text(json.dumps(table, indent=2) + "\n")


def best() -> float:
    """The success rate of the prompt with every instruction that helps."""
    return min(1.0, BASE + sum(worth for worth in WORTH if worth > 0))


if __name__ == "__main__":
    main()
