"""The planner's simulation of a profiled run, as recorded and with one thing changed.

The invariant: both are simulated on the same groups in the same order with the same costs but for the change, so that the luck
of a draw and an error of the calibration are in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning.errors import DataError
from lightning_planner.calibration import calibrate
from lightning_planner.costs import Costs, Schedule
from lightning_planner.recorded import PHASES, Recorded
from lightning_planner.simulation import simulate
from lightning_planner.work import Agent, Team

from lightning_debug.activity import each_call, server_costs
from lightning_debug.profile import Profile

STEPS = 24
"""Steps to simulate at least: the first of a simulation begins with nothing under way."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`teams` are the groups of the profiled steps; `tool_shares` is, for each of their agents, the share of the time before
    each call, and after the last one, that was a tool's. `phases` is the share of the wall time that is simulated."""

    recorded: Recorded
    costs: Costs
    teams: tuple[Team, ...]
    tool_shares: tuple[tuple[tuple[float, ...], ...], ...]
    phases: float
    base: float

    @classmethod
    def of(cls, profile: Profile) -> WhatIf | None:
        """Calibrate on the run; None where it has too little to calibrate on."""
        recorded = profile.recorded
        try:
            calibration = calibrate(recorded)
        except DataError:
            return None
        steps = {step.step for step in profile.steps}
        gaps = {id(one.recorded): one.gaps for one in profile.activities}
        chosen = [
            (team, tuple(gaps.get(id(one), ()) for one in group.rollouts))
            for team, group in zip(calibration.teams, recorded.groups, strict=True)
            if group.step in steps
        ]
        simulated = sum(step.seconds.get(phase, 0.0) for step in profile.steps for phase in PHASES)
        teams, shares = tuple(team for team, _ in chosen), tuple(share for _, share in chosen)
        one = cls(
            recorded,
            replace(calibration.costs, server=server_costs(recorded, calibration)),
            teams,
            shares,
            simulated / profile.seconds,
            0.0,
        )
        return replace(one, base=one._seconds(one.costs, teams)) if teams else None

    @property
    def rollouts_per_step(self) -> int:
        """How many a step needs."""
        return self.recorded.schedule.tasks_per_step * self.recorded.schedule.group_size

    def saves(
        self,
        *,
        concurrency: int | None = None,
        max_staleness: int | None = None,
        max_calls: int | None = None,
        tools: float = 1.0,
        code: float = 1.0,
        known: float | None = None,
    ) -> float:
        """The share of a step's wall time that a change saves; negative where it costs. `tools` and `code` are factors on the
        time of tools and of the agents' own code. `known` is the share of the prompts' tokens that vLLM had in its cache, where
        it is to find all that were there before."""
        now = self.recorded.schedule
        schedule = replace(
            now,
            concurrency=now.concurrency if concurrency is None else concurrency,
            max_staleness=now.max_staleness if max_staleness is None else max_staleness,
        )
        costs, teams, base = self.costs, self.teams, self.base
        if max_calls is not None:
            costs = replace(costs, server=replace(costs.server, max_calls=max_calls))
        if tools != 1.0 or code != 1.0:
            teams = tuple(
                replace(
                    team,
                    agents=tuple(
                        _faster(agent, gaps, tools, code) for agent, gaps in zip(team.agents, shares, strict=True)
                    ),
                )
                for team, shares in zip(teams, self.tool_shares, strict=True)
            )
        if known is not None:
            computing = each_call(self.recorded, lambda call: replace(call, fresh=round(call.prompt * (1 - known))))
            costs = replace(costs, server=calibrate(computing).costs.server)
            base = self._seconds(costs, tuple(_recomputed(team, known) for team in teams))
        return (1.0 - self._seconds(costs, teams, schedule) / base) * self.phases if base else 0.0

    def _seconds(self, costs: Costs, teams: Sequence[Team], schedule: Schedule | None = None) -> float:
        steps = max(STEPS, len(self.recorded.steps))
        simulated = simulate(replace(schedule or self.recorded.schedule, steps=steps), costs, itertools.cycle(teams))
        return simulated.mean(lambda step: step.seconds)


def _faster(agent: Agent, gaps: Sequence[float], tools: float, code: float) -> Agent:
    """An agent whose tools and code take so many times as long."""
    if not gaps:
        return agent
    factors = [share * tools + (1.0 - share) * code for share in gaps]
    calls = tuple(
        replace(call, wait=call.wait * factor, work=call.work * factor)
        for call, factor in zip(agent.calls, factors, strict=False)
    )
    return replace(agent, calls=calls, wait=agent.wait * factors[-1], work=agent.work * factors[-1])


def _recomputed(team: Team, known: float) -> Team:
    agents = tuple(
        replace(agent, calls=tuple(replace(call, fresh=round(call.prompt * (1 - known))) for call in agent.calls))
        for agent in team.agents
    )
    return replace(team, agents=agents)
