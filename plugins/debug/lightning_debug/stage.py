"""The plugin's stage at the steps of a run: the rules look at each step and at dry runs, and `trainer.alerts` hears of what is
serious.

The invariant: a rule sees what is recorded of the run up to now and nothing else, so that `lightning advise` finds the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
from lightning.config import Config
from lightning.trainer.stack import Stack
from lightning.trainer.stages import Added, Alarm, StepStage, StepTaken
from lightning.trainer.summary import Evaluation, Reporter
from lightning.trainer.weight_sync import bound_of
from lightning.types import Json, Status, Task

from lightning_debug.alerts import Alerts
from lightning_debug.dev import DevReport, dry_run
from lightning_debug.diagnosis import Attempted, Course, Diagnosis
from lightning_debug.rules import diagnose


class Advice(StepStage):
    """See the module. Raises `ConfigError` for alerts that cannot be told."""

    api, carries_out = 1, ("alerts",)

    def __init__(self, config: Config) -> None:
        self._gap, self._order = bound_of(config), config.trainer.order
        self._alerts = Alerts(config.trainer.alerts)
        self._steps: list[Mapping[str, float]] = []
        self._evaluations: Sequence[Evaluation] = ()

    async def begun(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """See `StepStage.begun`."""
        self._steps, self._evaluations = list(steps), evaluations
        return await self._found()

    async def taken(self, step: StepTaken) -> Added:
        """See `StepStage.taken`."""
        self._steps[step.step :] = [step.metrics]
        attempts = [Attempted.of(member) for group in step.groups for member in group.trajectories]
        failures = [rollout.error for rollout in step.rollouts if rollout.status is Status.FAILED]
        return Added(alarms=await self._found(attempts, step.train_agents, failures))

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """See `StepStage.evaluated`."""
        self._evaluations = evaluations
        return await self._found()

    async def _found(
        self, attempts: Sequence[Attempted] = (), train_agents: Sequence[str] = (), failures: Sequence[str] = ()
    ) -> list[Diagnosis]:
        course = Course(self._steps, self._evaluations, self._gap, self._order)
        found = await asyncio.to_thread(diagnose, attempts, train_agents, failures, course)
        return [diagnosis for diagnosis in found if not diagnosis.minor]

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        """See `StepStage.alarmed`."""
        self._alerts.send(alarm)

    async def ended(self) -> None:
        """See `StepStage.ended`."""
        await self._alerts.close()

    async def rehearsed(
        self,
        stack: Stack,
        tasks: Sequence[Task],
        train_agents: Sequence[str],
        algorithm: Algorithm | SearchAlgorithm,
        reporter: Reporter,
    ) -> DevReport:
        """See `StepStage.rehearsed`."""
        return await dry_run(stack, tasks, train_agents, algorithm, reporter)
