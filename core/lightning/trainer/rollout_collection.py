"""Where a step's groups come from: sampled when the step is due (here), or all the time (`lightning.trainer.async_collection`).

The invariant: what a step looked at is a list of groups that can be read from the store again, each finished, each looked
at by one step only; whatever was planned before an interruption is run to its end after it and not planned twice.
"""

from __future__ import annotations

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from lightning.batch.trajectory import Group
from lightning.errors import RunnerError
from lightning.store.epochs import Epoch, epoch_at
from lightning.trainer.algorithm import AlgorithmSchedule, samples_dynamically
from lightning.trainer.plan import TRAIN, generation, is_lost, place_after, tasks_of_wave, train_rollouts
from lightning.trainer.reasons import grouped
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Reporter
from lightning.trainer.task_choice import TaskChoice
from lightning.trainer.training_data import all_rollouts, load_groups, of_groups
from lightning.trainer.tree_sampling import TreeGrower
from lightning.types import Rollout, Status, Task

logger = logging.getLogger(__name__)

MOST_REASONS = 3
"""Reasons that a warning names at most."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step looked at: the groups, and all of their rollouts, failed ones included, in the same order.

    `seconds` is the time in which they were sampled; `metrics` are the sampler's own.
    """

    rollouts: Sequence[Rollout]
    groups: Sequence[Group]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


class Sampler(ABC):
    """Runs agents for the loop; use it with `async with`. `finished` hears of every rollout that ends for good."""

    def __init__(
        self,
        stack: Stack,
        schedule: AlgorithmSchedule,
        tasks: Sequence[Task],
        agents: Sequence[str],
        reporter: Reporter,
        finished: Callable[[Rollout], None],
        epochs: Sequence[Epoch] = (),
    ) -> None:
        self.epochs = epochs or [Epoch(0, 0, stack.run.config)]
        self.stack, self.schedule, self.tasks, self.agents = stack, schedule, tasks, agents
        self.reporter, self.finished = reporter, finished
        self.config = stack.config.trainer
        learnable = self.config.order == "learnable"
        self.choice = TaskChoice(tasks, self.config.seed, self.config.policy_fault) if learnable else None
        self.trees = TreeGrower(self.config) if self.config.sampling == "tree" else None

    async def __aenter__(self) -> Self:
        if self.choice is not None:
            await self.choice.recall(self.stack.store, self.stack.run)
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None:
        """Begin what goes on in the background, after the policy server has the weights of the last committed step."""

    @abstractmethod
    async def close(self) -> None:
        """End what goes on in the background."""

    @abstractmethod
    async def step(self, step: int) -> Sampled:
        """The groups of a step. Raises `RunnerError` when every one of its rollouts failed."""

    @abstractmethod
    async def finish(self, rollouts: list[Rollout]) -> None:
        """Create rollouts (again, harmlessly, after a resume); every one of them has ended when this returns."""

    async def served(self, version: int, rollouts: Sequence[Rollout]) -> None:
        """The policy server has the weights of `version`: so many steps are committed, the last of which looked at these."""
        if self.choice is not None:
            begun = [
                rollout for rollout in rollouts if rollout.parent is None
            ]  # branches begin in states that were chosen
            await self.choice.learn(self.stack.store, version - 1, begun)

    async def execute(self, plan: Callable[[int], list[Rollout]], what: str) -> list[Rollout]:
        """Run a planned evaluation to its end. Raises `RunnerError` when it is lost as a whole.

        `plan(n)` plans the n-th try at it; a try that was lost as a whole before a resume is not the last.
        """
        first = plan(0)
        known = await all_rollouts(self.stack.store, first[0].run, split=first[0].split, step=first[0].step)
        rollouts = await self.ended(plan(generation(known, first)), what)
        self.check(what, rollouts)
        return rollouts

    async def ended(self, planned: list[Rollout], what: str) -> list[Rollout]:
        """Run planned rollouts of one step and split to their end."""
        self.reporter.phase(what, len(planned))
        await self.finish(planned)
        one = planned[0]
        known = await all_rollouts(self.stack.store, one.run, split=one.split, step=one.step)
        return of_groups(known, [rollout.group for rollout in planned])

    async def groups_of(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """The groups of ended rollouts."""
        return await load_groups(self.stack.store, rollouts, self.agents, self.config.policy_fault)

    def check(self, what: str, rollouts: Sequence[Rollout]) -> None:
        """Tell how many failed. Raises `RunnerError` when that leaves nothing to learn from."""
        said = self.tell_failed(what, rollouts)
        if said and is_lost(rollouts):
            raise RunnerError(
                f"{what}: all {len(rollouts)} failed, there is nothing to learn from: {said} "
                f"(whole tracebacks: lightning runs show {self.stack.run.id} --failed --json)"
            )

    def tell_failed(self, what: str, rollouts: Sequence[Rollout]) -> str:
        """Warn of those that failed, and return why they did; empty where none has."""
        failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
        if not failed:
            return ""
        reasons = [f"{count} x {why}" for count, why in grouped(rollout.error for rollout in failed)]
        said = "; ".join(reasons[:MOST_REASONS]) + ("; ..." if len(reasons) > MOST_REASONS else "")
        logger.warning("%s: %d of %d failed: %s", what, len(failed), len(rollouts), said)
        return said


class TurnSampler(Sampler):
    """Samples and trains in turns: every token of a step comes from the weights that the step starts with.

    With dynamic sampling a step samples in waves until `tasks_per_step` of its groups teach something, or for
    `trainer.max_waves` waves; it trains on all that teach.
    """

    async def start(self) -> None:
        """Nothing: nothing goes on between steps."""

    async def close(self) -> None:
        """Nothing: see `start`."""

    async def finish(self, rollouts: list[Rollout]) -> None:
        """See `Sampler.finish`."""
        await self.stack.execute(rollouts, self.finished)

    async def step(self, step: int) -> Sampled:
        """See `Sampler.step`."""
        began, algorithm = time.monotonic(), self.schedule.at(step)
        count, what = self.config.tasks_per_step, f"rollouts of step {step + 1}"
        waves = self.config.max_waves if samples_dynamically(algorithm) else 1
        plan = functools.partial(self._planned, step, algorithm.group_size)
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=TRAIN, step=step)
        later = [rollout for wave in range(1, waves) for rollout in plan(wave, 0)] if known else []
        number = generation(known, plan(0, 0), later)
        rollouts: list[Rollout] = []
        groups: list[Group] = []
        teaching, wave = 0, 0
        while teaching < count and wave < waves:
            named = f"{what}, wave {wave + 1}" if wave else what
            ended = await self.ended(plan(wave, number), named)
            if self.trees is not None:
                ended = await self.trees.grow(self, ended, algorithm.group_size, named)
            rollouts += ended
            self.check(what, rollouts)
            groups += await self.groups_of(ended)
            if samples_dynamically(algorithm):
                teaching += sum(algorithm.teaches(group) for group in groups[-count:])
            wave += 1
        metrics = {"waves": float(wave), "groups_teaching": float(teaching)} if samples_dynamically(algorithm) else {}
        if self.trees is not None:
            metrics |= self.trees.metrics(groups, rollouts)
        return Sampled(rollouts, groups, time.monotonic() - began, metrics)

    def _planned(self, step: int, size: int, wave: int, number: int) -> list[Rollout]:
        """The rollouts of one wave of a step, in the `number`-th try at it."""
        config, attempts = self.config, self.stack.config.runner.max_attempts
        count, first = config.tasks_per_step, wave * config.tasks_per_step
        if self.choice is not None:
            tasks = self.choice.of_step(step, size, first, count)
        else:
            assert config.order != "learnable"
            now = epoch_at(self.epochs, step)
            until = self.epochs[: now.number + 1]
            taken = [(after.first - before.first) * _per_step(before, count) for before, after in pairwise(until)]
            begin = place_after(until, taken, self.tasks)
            tasks = tasks_of_wave(self.tasks, step - now.first, wave, count, config.seed, config.order, begin)
        begun = size if self.trees is None else self.trees.trunks(size)
        return train_rollouts(self.stack.run.id, step, tasks, begun, attempts, generation=number, first=first)


def _per_step(epoch: Epoch, otherwise: int) -> int:
    """How many tasks a step of a config epoch takes."""
    found = epoch.setting("trainer", "tasks_per_step")
    return found if isinstance(found, int) else otherwise
