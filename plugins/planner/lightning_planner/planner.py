"""A plan: the recorded run, and then the planned run, simulated by the same code.

The invariant: a plan always shows how well the simulation repeats the run that it was calibrated on, and the list of its
assumptions. Both say that they are simulated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightning.config import Config, EngineConfig

from lightning_planner.calibration import Calibration, calibrate
from lightning_planner.cluster import Cluster
from lightning_planner.costs import Changes, Costs, Schedule, Sharing, Team, draw
from lightning_planner.memory import Memory, memory, uncounted
from lightning_planner.recorded import PHASES, Recorded, forward_passes
from lightning_planner.shape import Shape
from lightning_planner.simulation import Phases, Simulated, simulate
from lightning_planner.speed import server_costs, trainer_costs

LABEL = "simulation: no number of a plan was measured"
"""Label of everything that a plan prints or writes."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to plan for. Without a `cluster` (and the model's `shape`) it is the recorded run's machine. The agents' machines do
    `agents` times the recorded work in a second; with a cluster they are other machines than its GPUs. `seed` draws the
    groups."""

    schedule: Schedule
    config: Config
    changes: Changes = field(default_factory=Changes)
    agents: float = 1.0
    shape: Shape | None = None
    cluster: Cluster | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """The seconds of the recorded run and of its simulation, without the first step. `calls` is the share of the variance of
    the calls' durations that the calibrated costs explain."""

    recorded: Phases
    simulated: Phases
    calls: float

    @property
    def error(self) -> float:
        """How much longer a simulated step is than a recorded one, as a share of the recorded one."""
        return self.simulated.total / self.recorded.total - 1.0 if self.recorded.total else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The simulated numbers of a target. `tokens_per_second` are trained response tokens. Staleness is in steps, over the
    trained tokens. `server_busy`, `places_busy` and `trainer_busy` are shares of the time; `batch` is the mean number of calls
    decoded at once. `memory` is empty without a cluster."""

    schedule: Schedule
    costs: Costs
    step: Phases
    tokens_per_second: float
    staleness_mean: float
    staleness_max: int
    server_busy: float
    batch: float
    places_busy: float
    trainer_busy: float
    memory: tuple[Memory, ...]
    notes: tuple[str, ...]


def make_plan(recorded: Recorded, calibration: Calibration, target: Target) -> Plan:
    """Simulate a target with the work of a calibrated run. Raises `ConfigError` for a model that leaves vLLM no room for a KV
    cache, and for an engine that cannot be planned; other lacks of memory are notes of the plan."""
    teams = [target.changes.apply(team) for team in calibration.steady]
    memories: Sequence[Memory] = ()
    if target.shape is not None and target.cluster is not None:
        share = target.config.policy_server.gpu_memory_utilization
        memories = memory(target.shape, target.cluster, target.config.engine, share)
    costs, notes = _costs(recorded, calibration, target, teams)
    simulated = simulate(target.schedule, costs, draw(teams, target.schedule.group_size, target.seed))
    total = simulated.mean(lambda step: step.total)
    notes += [
        f"{use.role}: {use.used / 1e9:.0f} GB do not fit into {use.available / 1e9:.0f} GB"
        for use in memories
        if not use.fits
    ]
    return Plan(
        schedule=target.schedule,
        costs=costs,
        step=_phases(simulated),
        tokens_per_second=simulated.mean(lambda step: step.tokens) / total if total else 0.0,
        staleness_mean=simulated.mean(lambda step: step.staleness_mean),
        staleness_max=max(step.staleness_max for step in simulated.steps),
        server_busy=simulated.server_busy,
        batch=simulated.batch,
        places_busy=simulated.places_busy,
        trainer_busy=simulated.trainer_busy,
        memory=tuple(memories),
        notes=tuple(notes),
    )


def replay(recorded: Recorded, calibration: Calibration) -> Replay:
    """Simulate the recorded run itself: the same groups in the same order, and as many steps."""
    schedule = replace(recorded.schedule, steps=len(recorded.steps))
    # If sampling goes on all the time, more groups begin than the committed steps took.
    teams = chain(calibration.teams, draw(calibration.steady, schedule.group_size, 0))
    simulated = simulate(schedule, calibration.costs, teams)
    means = {phase: statistics.fmean(step.seconds.get(phase, 0.0) for step in recorded.steady) for phase in PHASES}
    return Replay(Phases(**means), _phases(simulated), calibration.fit)


def calibrated(recorded: Recorded) -> tuple[Calibration, Replay]:
    """Compute the costs of a recorded run, and simulate the run with them. Raises as `calibrate` does."""
    calibration = calibrate(recorded)
    return calibration, replay(recorded, calibration)


def _size(schedule: Schedule) -> int:
    return schedule.tasks_per_step * schedule.group_size


def _costs(
    recorded: Recorded, calibration: Calibration, target: Target, teams: Sequence[Team]
) -> tuple[Costs, list[str]]:
    known, shape, cluster = calibration.costs, target.shape, target.cluster
    power = known.sharing.agents * target.agents
    notes = []
    if math.isinf(known.sharing.agents):
        notes.append(
            "agents were not in each other's way when they were recorded: that holds for any number of them here"
        )
    if shape is None or cluster is None:
        # If sampling went on all the time, the recorded training times already include the agents' load.
        alone = recorded.schedule.max_staleness == 0
        sharing = Sharing(agents=power, trainer_with_agents=math.isfinite(power) and alone)
        if recorded.schedule.max_staleness == 0 < target.schedule.max_staleness:
            notes.append(
                "recorded in turns: how much training slows down calls on the same machine is not known from it"
            )
        if not known.trainer.step and _size(target.schedule) * target.changes.token_scale != _size(recorded.schedule):
            notes.append(
                "what a step's training takes whatever its size does not show in the recorded steps: it is taken to grow with "
                "the tokens"
            )
        return replace(known, sharing=sharing), notes
    share = target.config.policy_server.gpu_memory_utilization
    calls = [call for team in teams for agent in team.agents for call in agent.calls]
    context = statistics.fmean(call.prompt + call.response / 2 for call in calls) if calls else 1.0
    rows = [agent.rows for team in teams for agent in team.agents if agent.rows]
    length = statistics.fmean(rows) if rows else 1.0
    passes = forward_passes(recorded) or 0
    return (
        Costs(
            server=server_costs(shape, cluster, share, context),
            trainer=trainer_costs(shape, cluster, target.config.engine, length, passes),
            sharing=Sharing(agents=power, one_device=cluster.shared),
            dispatch=known.dispatch,
            turn=known.turn,
        ),
        [*notes, *_notes_on_gpus(recorded, target.config.engine, cluster)],
    )


def _notes_on_gpus(recorded: Recorded, engine: EngineConfig, cluster: Cluster) -> Iterator[str]:
    yield "calls are as many and as long as those of the recorded model"
    if forward_passes(recorded) is None:
        yield (
            "the record does not say what the algorithm computes before a step's gradient: passes for a reference model, a "
            "loss of whole steps or a critic are not in the seconds of training"
        )
    if cluster.server_gpus > 1:
        yield (
            f"one policy server on {cluster.server_gpus} GPUs, since a run has one: what these exchange is not in its seconds"
        )
    yield from uncounted(engine, cluster.training)


def _phases(simulated: Simulated) -> Phases:
    return Phases(
        simulated.mean(lambda step: step.rollout),
        simulated.mean(lambda step: step.train),
        simulated.mean(lambda step: step.checkpoint),
        simulated.mean(lambda step: step.update),
    )
