"""The order of tasks `learnable`: a step takes the tasks whose groups will probably have different rewards.

The invariant: a choice depends only on the seed, its place and the run's committed steps, so that a resumed run makes the same
choices. Past runs are read once, at the run's first start, and their results are kept with the run. Nothing of a step counts
before the step is committed.

A group whose rewards are all equal teaches nothing. With the success rate p of a task, a group of n rollouts has different
rewards with the probability 1 - p^n - (1 - p)^n. The knowledge of p is a Beta distribution, from which each choice draws a few
values for each task (Thompson sampling), so that little-known tasks are tried as well. Evidence fades as the policy changes, so
that a solved or hopeless task is tried again now and then. Tasks with a high variance of success teach most, see arXiv
2502.12272.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt
from lightning.store.pages import batched, each_rollout, each_step
from lightning.store.protocol import Store
from lightning.trainer.context import PolicyFault, is_over
from lightning.trainer.plan import TRAIN
from lightning.trainer.samplers import TaskOrder
from lightning.types import Fault, Json, Rollout, Run, Status, Task

HALF_LIFE = 10.0
"""Number of steps after which a rollout counts half."""
PRIOR = 2.0
"""The weight, in rollouts, of the success rate of all tasks in the belief about one task."""
DRAWS = 4
"""Number of draws of each success rate, whose mean chance counts. With a single draw, some of thousands of unknown tasks would
nearly always come before tasks that are known to teach."""
UNCERTAIN = (0.1, 0.9)
"""The success rate of all tasks is clipped to this range, so that an untried task counts neither as hopeless nor as solved."""
PAST_RUNS, PAST_ROLLOUTS = 16, 8.0
"""Most past runs that are read (the newest), and the most rollouts that all their results about a task count for."""
STATE = "task_choice/past"
"""The key in a run's state for the results of past runs about its tasks."""
READ_AT_ONCE = 1000
RANGE_STEPS, OUTLIERS = 20, 0.01
"""Number of last steps whose rewards determine their range, and the share at either end that is left out as outliers."""
LARGEST, SMALLEST, ROUNDING = 1e150, 1e-150, 1e-7
"""Rewards are clipped to `LARGEST`, whose square can be computed. Rewards in a range below `SMALLEST`, or below `ROUNDING`
times their size, count as equal, because their variance could not be computed."""

Floats = npt.NDArray[np.float64]


class Lost(Enum):
    """How a rollout failed: by the policy, which counts as a miss, or otherwise, so that it is left out of its group."""

    BY_POLICY = "by the policy"
    OTHERWISE = "otherwise"


Earned = list[tuple[int, float | Lost]]
"""For each rollout, the index of its task (-1: it does not count), and its return or how it failed."""


class TaskChoice(TaskOrder):
    """The order `learnable`, with its knowledge of each task. Call `recall` first, then `learn` with each committed step, in
    order."""

    api = 1

    def __init__(self, tasks: Sequence[Task], seed: int, policy_fault: PolicyFault = 0.0) -> None:
        self._tasks, self._seed, self._policy_fault = tasks, seed, policy_fault
        self._places = {_key(task): place for place, task in enumerate(tasks)}
        self._steps = 0
        self._at = np.zeros(len(tasks))
        # For each task: the number of rewarded rollouts, the sum and the sum of squares of their rewards, the number that the
        # policy failed, and the number that failed otherwise and are left out of their group.
        self._sums = np.zeros((len(tasks), 5))
        self._past_range: tuple[float, float] | None = None
        self._recent: dict[int, list[Floats]] = {}  # all rewards of the last steps, for their range

    async def recall(self, store: Store, run: Run) -> None:
        """Read the results of past runs (at the run's first start, then from its state) and of this run's committed steps."""
        kept = await store.get_state(run.id, STATE)
        if not isinstance(kept, Mapping):
            kept = await store.keep_state(run.id, STATE, await self._past(store, run))
        assert isinstance(kept, Mapping)
        self._begin_with(kept)
        steps: dict[str, int] = {}
        async for record in each_step(store, run.id):
            steps |= dict.fromkeys(record.groups, record.step)
            self._steps = record.step
        seen: dict[int, Earned] = {}
        async for rollouts in _ended(store, run.id):
            begun = (one for one in rollouts if one.parent is None)
            taken = [one for one in begun if one.group in steps]
            for one, earned in zip(taken, await self._earned(store, taken), strict=True):
                seen.setdefault(steps[one.group], []).append(earned)
        for step in sorted(seen):
            self._add(step, seen[step])

    async def learn(self, store: Store, step: int, rollouts: Sequence[Rollout]) -> None:
        """Count the rollouts of a step that was committed."""
        earned = await self._earned(store, rollouts)
        self._add(step, earned)
        self._steps = step

    def ranked(self, place: str, group_size: int, *, without: Collection[str] = ()) -> list[Task]:
        """Return all tasks once: those with the highest chance of different rewards first, those in `without` (ids) last.
        `place` seeds the random draws."""
        rng = np.random.default_rng(random.Random(f"{self._seed}/learnable/{place}").getrandbits(128))  # noqa: S311
        rates = rng.beta(*self._beliefs(), size=(DRAWS, len(self._tasks)))
        size = max(2, group_size) * (1.0 - self._left_out())
        mixed = np.mean(1.0 - rates**size - (1.0 - rates) ** size, axis=0)
        order = np.lexsort((rng.random(len(mixed)), -mixed))
        ranked = [self._tasks[place] for place in order]
        return sorted(ranked, key=lambda task: task.id in without) if without else ranked

    def _left_out(self) -> Floats:
        """Return the expected share of each task's rollouts that fail and are left out of their group, shape (tasks,)."""
        counts = self._sums * 0.5 ** ((self._steps - self._at) / HALF_LIFE)[:, None]
        share: Floats = counts[:, 4] / (counts[:, 0] + counts[:, 3] + counts[:, 4] + PRIOR)
        return share

    def _beliefs(self) -> tuple[Floats, Floats]:
        """Return the two parameters of each task's Beta distribution, shape (tasks,).

        Rewards may be any numbers. A task is treated as a coin with the same variance, relative to the range of the last steps'
        rewards. So rewards that are always 0.5 teach nothing, and for rewards of 0 or 1 the coin's rate is their mean.
        """
        rewarded, sums, squares, failed, _ = self._sums.T * 0.5 ** ((self._steps - self._at) / HALF_LIFE)
        low, high = self._range() or (0.0, 0.0)
        width = high - low
        differ = width > max(ROUNDING * max(abs(low), abs(high)), SMALLEST)
        count = np.where(rewarded > 0, rewarded, 1.0)
        mean = sums / count
        variance = (squares / count - mean**2) / width**2 if differ else np.zeros_like(mean)
        less = (1.0 - np.sqrt(1.0 - 4.0 * np.clip(variance, 0.0, 0.25))) / 2.0
        good = mean > (low + width / 2 if differ else 0.0)
        successes = np.where(good, 1.0 - less, less) * rewarded
        misses = rewarded - successes + failed
        total = successes.sum() + misses.sum()
        rate = float(np.clip((successes.sum() + PRIOR / 2) / (total + PRIOR), *UNCERTAIN))
        return successes + PRIOR * rate, misses + PRIOR * (1.0 - rate)

    def _add(self, step: int, earned: Earned) -> None:
        """Add the results of a step. The sums do not depend on the order of rollouts, which is another one after a resume."""
        found: dict[int, list[float | Lost]] = {}
        for place, value in earned:
            if place >= 0:
                found.setdefault(place, []).append(value)
        for place, values in found.items():
            rewards = np.clip(np.sort([one for one in values if isinstance(one, float)]), -LARGEST, LARGEST)
            failed, lost = values.count(Lost.BY_POLICY), values.count(Lost.OTHERWISE)
            fading = 0.5 ** ((step - self._at[place]) / HALF_LIFE)
            new = [len(rewards), rewards.sum(), (rewards**2).sum(), failed, lost]
            self._sums[place] = self._sums[place] * fading + new
            self._at[place] = step
            if len(rewards):
                self._recent.setdefault(step, []).append(rewards)
        for old in [known for known in self._recent if known <= step - RANGE_STEPS]:
            del self._recent[old]

    def _range(self) -> tuple[float, float] | None:
        """Return the range of rewards without outliers; None before any reward is known."""
        if not self._recent:
            return self._past_range
        rewards = np.concatenate([part for parts in self._recent.values() for part in parts])
        low, high = np.quantile(rewards, [OUTLIERS, 1.0 - OUTLIERS])
        if low == high:  # nearly all are equal: the others are not outliers
            low, high = rewards.min(), rewards.max()
        return float(low), float(high)

    async def _earned(self, store: Store, rollouts: Sequence[Rollout]) -> Earned:
        """Return the result of each rollout. Its task's index is -1 if it does not count: its task is not in the list, or
        infrastructure lost it."""
        scored = [one for one in rollouts if one.status is Status.SUCCEEDED and _key(one.task) in self._places]
        attempts = await store.attempts_of([(one.id, one.attempt) for one in scored])
        inside = {
            one.id: sum(reward.value for reward in attempt.step_rewards)
            for one, attempt in zip(scored, attempts, strict=True)
        }
        found: Earned = []
        for one in rollouts:
            place = self._places.get(_key(one.task), -1)
            if one.id in inside:
                found.append((place, (one.reward or 0.0) + inside[one.id]))
            elif one.status is Status.FAILED and not (one.fault and one.fault.is_loss):
                counts = one.fault is Fault.POLICY and self._policy_fault != "exclude"
                found.append((place, Lost.BY_POLICY if counts else Lost.OTHERWISE))
            else:
                found.append((-1, Lost.OTHERWISE))
        return found

    async def _past(self, store: Store, run: Run) -> Json:
        """Read the newest ended runs of the project, and return each task's sums and the range of rewards, as JSON."""
        over: list[str] = []
        for other in await store.list_runs(run.project, brief=True):
            if len(over) < PAST_RUNS and other.id != run.id and await is_over(store, other.id):
                over.append(other.id)
        known = TaskChoice(self._tasks, self._seed, self._policy_fault)
        for name in over:
            async for rollouts in _ended(store, name):
                known._add(-1, await known._earned(store, rollouts))
        counts = known._sums[:, [0, 3, 4]].sum(axis=1)
        share = np.minimum(1.0, PAST_ROLLOUTS / np.maximum(counts, 1.0))
        tasks: dict[str, Json] = {
            key: (known._sums[place] * share[place]).tolist() for key, place in self._places.items() if counts[place]
        }
        between = known._range()
        ranged: Json = list(between) if between else None
        return {"runs": list(over), "tasks": tasks, "range": ranged}

    def _begin_with(self, kept: Mapping[str, Json]) -> None:
        tasks, ranged = kept["tasks"], kept["range"]
        assert isinstance(tasks, Mapping)
        for key, sums in tasks.items():
            if key in self._places:
                self._sums[self._places[key]] = np.asarray(sums, dtype=np.float64)
        if isinstance(ranged, Sequence):
            low, high = (float(str(bound)) for bound in ranged)
            self._past_range = low, high


def _key(task: Task) -> str:
    """Return a digest that is equal for tasks with the same id and input."""
    text = json.dumps([task.id, task.input], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _ended(store: Store, run: str) -> AsyncIterator[list[Rollout]]:
    """Yield the ended training rollouts of a run, in batches."""
    each = each_rollout(store, run, split=TRAIN)
    return batched((one async for one in each if one.status.ended), READ_AT_ONCE)
