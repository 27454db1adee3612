"""What a group of the first rollouts that end (`Session.rollout`, `keep`) teaches, beside a group that waits for all.

A simulated agent answers after 1 to `TURNS` turns. Its policy has a logit for each turn, to answer now, and one for a skill
that has nothing to do with the length. An answer is right only with the skill, and then by a chance that rises with the number
of turns, falls with it, or is the same for all. A turn takes a lognormal time, and all rollouts of a group begin at once. The
true gradient of the expected reward is known exactly; that of GRPO is the mean over many groups, and points the same way if
nothing is cut off, because rewards are 0 or 1. Then each way trains from the same policy. Its exact reward is compared after as
many steps, and after as much time, if nothing but groups takes any.

    python tests/bench/bench_keep.py [--json FILE] [--seeds N] [--groups N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from lightning.credit import grpo

Floats = npt.NDArray[np.float64]
Score = tuple[float, float | None]
"""A mean over seeds and its deviation; None of one seed."""
TURNS = 8
SPREAD = 0.5
"""Deviation of the logarithm of a turn's time, whose median is 1."""
FIRST_LOGIT = -1.0
"""The first logit to answer in a turn: a chance of 0.27."""
STEP_GROUPS, RATE = 16, 1.0
"""Groups of a step, and its length, of the simulated training."""
WAYS = {"all 8": (8, 8), "8 of 10": (10, 8), "8 of 12": (12, 8), "8 of 16": (16, 8)}
"""How many rollouts of a group begin, and how many are kept."""
KINDS = {"longer answers are better": (0.1, 0.9), "as good": (0.5, 0.5), "shorter ones are better": (0.9, 0.1)}
"""The chance of a right answer after the first turn and after the last."""


@dataclass
class Policy:
    """`logits` (TURNS - 1,) of answering in a turn, which the last turn always does, and of the `skill`."""

    logits: Floats
    skill: float = 0.0

    @classmethod
    def first(cls) -> Policy:
        """Return the policy at the beginning."""
        return cls(np.full(TURNS - 1, FIRST_LOGIT))

    @property
    def lengths(self) -> Floats:
        """The probability of each length (TURNS,)."""
        now = np.append(sigmoid(self.logits), 1.0)
        return now * np.cumprod(np.append(1.0, 1.0 - now[:-1]))

    def reward(self, right: Floats) -> float:
        """Return the expected reward."""
        return float(sigmoid(self.skill) * (self.lengths * right).sum())

    def turns(self) -> float:
        """Return the expected number of turns."""
        return float((self.lengths * np.arange(1, TURNS + 1)).sum())

    def scores(self) -> Floats:
        """Return the gradient of the logarithm of each length's probability, shape (TURNS, TURNS - 1)."""
        now, ends = sigmoid(self.logits), np.arange(TURNS)[:, None]
        turn = np.arange(TURNS - 1)
        return np.where(turn == ends, 1.0 - now, np.where(turn < ends, -now, 0.0))

    def gradient(self, right: Floats) -> Floats:
        """Return the gradient of the expected reward, shape (TURNS,): of the logits, and of the skill."""
        able = sigmoid(self.skill)
        of_lengths = able * (self.lengths * right) @ self.scores()
        return np.append(of_lengths, (1.0 - able) * self.reward(right))


@dataclass(frozen=True)
class Sampled:
    """Means over groups. `gradient` (TURNS,) is GRPO's; `time` is that of a group."""

    reward: float
    turns: float
    time: float
    gradient: Floats


def sigmoid(logits: npt.ArrayLike) -> Floats:
    """Return the probabilities of logits."""
    return 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))


def sampled(policy: Policy, right: Floats, way: tuple[int, int], groups: int, rng: np.random.Generator) -> Sampled:
    """Sample groups, and keep of each the rollouts that ended first."""
    size, keep = way
    ends = rng.choice(TURNS, (groups, size), p=policy.lengths)
    each = rng.lognormal(0.0, SPREAD, (groups, size, TURNS))
    times = np.take_along_axis(np.cumsum(each, axis=-1), ends[..., None], axis=-1)[..., 0]
    able = rng.random((groups, size)) < sigmoid(policy.skill)
    rewards = (able & (rng.random((groups, size)) < right[ends])).astype(np.float64)
    kept = np.argsort(times, axis=1)[:, :keep]
    ends, able = np.take_along_axis(ends, kept, axis=1), np.take_along_axis(able, kept, axis=1)
    rewards, times = np.take_along_axis(rewards, kept, axis=1), np.take_along_axis(times, kept, axis=1)
    advantages = np.stack([grpo(own) for own in rewards])
    of_skill = able - sigmoid(policy.skill)
    scores = np.concatenate([policy.scores()[ends], of_skill[..., None]], axis=-1)
    gradient = (advantages[..., None] * scores).mean(axis=(0, 1))
    return Sampled(float(rewards.mean()), float(ends.mean() + 1), float(times.max(axis=1).mean()), gradient)


def compared(kind: str, way: str, groups: int, steps: int, seed: int) -> dict[str, float]:
    """Return the numbers of one seed."""
    right, policy, rng = np.linspace(*KINDS[kind], TURNS), Policy.first(), np.random.default_rng(seed)
    truth, found = policy.gradient(right), sampled(policy, right, WAYS[way], groups, rng)
    whole = sampled(policy, right, WAYS["all 8"], groups, np.random.default_rng(seed + 1000))
    longer = (policy.lengths * np.arange(1, TURNS + 1)) @ policy.scores()
    after, share = trained(policy, right, WAYS[way], steps, rng), found.time / whole.time
    in_time = trained(policy, right, WAYS[way], round(steps / share), rng)
    return {
        "bias of the mean reward": found.reward - policy.reward(right),
        "bias of the turns": found.turns - policy.turns(),
        "time of a group": share,
        "cosine": float(found.gradient @ truth / np.linalg.norm(found.gradient) / np.linalg.norm(truth)),
        "push to more turns": float(found.gradient[:-1] @ longer),
        "push to the skill": float(found.gradient[-1]),
        "reward after training": after.reward(right),
        "turns after training": after.turns(),
        "reward after as much time": in_time.reward(right),
    }


def trained(policy: Policy, right: Floats, way: tuple[int, int], steps: int, rng: np.random.Generator) -> Policy:
    """Return the policy after steps of GRPO."""
    for _ in range(steps):
        gradient = sampled(policy, right, way, STEP_GROUPS, rng).gradient
        policy = Policy(policy.logits + RATE * gradient[:-1], policy.skill + RATE * float(gradient[-1]))
    return policy


def show(results: Mapping[str, Mapping[str, Mapping[str, Score]]]) -> None:
    """Print a table for each kind of task, with means and deviations over the seeds; the mean alone of one seed."""
    for kind, ways in results.items():
        names = list(next(iter(ways.values())))
        sys.stdout.write(f"\n{kind}\n\n| kept | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}\n")
        for way, found in ways.items():
            cells = (
                f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"
                for mean, deviation in found.values()
            )
            sys.stdout.write(f"| {way} | {' | '.join(cells)} |\n")


def main() -> None:
    """Print the tables, and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    results: dict[str, dict[str, dict[str, Score]]] = {}
    for kind in KINDS:
        for way in WAYS:
            runs = [compared(kind, way, given.groups, given.steps, seed) for seed in range(given.seeds)]
            results.setdefault(kind, {})[way] = {
                name: (statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else None)
                for name in runs[0]
                for own in [[run[name] for run in runs]]
            }
    show(results)
    policy = Policy.first()
    rewards = ", ".join(f"{policy.reward(np.linspace(*ends, TURNS)):.3f}" for ends in KINDS.values())
    sys.stdout.write(
        f"\nat first: {policy.turns():.2f} turns, rewards {rewards}; {given.seeds} seeds of {given.groups} groups; "
        f"{given.steps} steps of {STEP_GROUPS} groups\n"
    )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
