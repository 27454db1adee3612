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

from lightning.config import Config, PolicyServerConfig
from lightning_replicas.config import OWN_GPU_SHARE

from lightning_planner.calibration import Calibration, calibrate
from lightning_planner.cluster import Cluster
from lightning_planner.costs import Changes, Costs, Schedule, Sharing, Team, draw
from lightning_planner.gateways import gateway_costs
from lightning_planner.memory import Memory, memory, uncounted
from lightning_planner.recorded import PHASES, Recorded, forward_passes
from lightning_planner.shape import Shape
from lightning_planner.simulation import Phases, Simulated, simulate
from lightning_planner.speed import server_costs, trainer_costs

LABEL = "simulation: no number of a plan was measured"
"""Label of everything that a plan prints or writes."""
BUSY = 0.9
"""The share of the time from which the agents' machines hold a run up."""
MUCH = 0.1
"""The share of prompt tokens that are computed again, from which that is worth a note."""


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

    def with_staleness(self, bound: int) -> Target:
        """Return the target with another `trainer.max_staleness`."""
        return replace(self, schedule=replace(self.schedule, max_staleness=bound))


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
    decoded at once on a server, `calls` the calls a second. With a cluster, `contexts` is how many agents' conversations, at
    their longest, the KV caches hold at once (None where it is not known), and `again` the share of the prompts' tokens that
    are computed again, because the cache displaced them, or an update dropped them. `memory` is empty without a cluster."""

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
    calls: float
    contexts: int | None
    again: float
    memory: tuple[Memory, ...]
    notes: tuple[str, ...]


def make_plan(recorded: Recorded, calibration: Calibration, target: Target) -> Plan:
    """Simulate a target with the work of a calibrated run. Raises `ConfigError` for a model that leaves vLLM no room for a KV
    cache, and for an engine that cannot be planned; other lacks of memory are notes of the plan."""
    teams = [target.changes.apply(team) for team in calibration.steady]
    memories: Sequence[Memory] = ()
    if target.shape is not None and target.cluster is not None:
        share = share_of(target.config, target.cluster)
        memories = memory(target.shape, target.cluster, target.config.engine, share)
    costs, notes = costs_of(recorded, calibration, target, teams)
    simulated = simulate(target.schedule, costs, draw(teams, target.schedule.group_size, target.seed))
    total = simulated.mean(lambda step: step.total)
    notes += [
        f"{use.role}: {use.used / 1e9:.0f} GB do not fit into {use.available / 1e9:.0f} GB"
        for use in memories
        if not use.fits
    ]
    contexts = _contexts(costs, teams)
    notes += _limits(target.schedule, simulated, contexts)
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
        calls=simulated.calls,
        contexts=contexts,
        again=simulated.again,
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


def _limits(schedule: Schedule, simulated: Simulated, contexts: int | None) -> Iterator[str]:
    """Yield notes on what holds a plan up besides its GPUs' speed."""
    if simulated.agents_busy > BUSY:
        yield (
            f"the agents' machines compute {simulated.agents_busy:.0%} of the time, so they hold the run up: --agent-machines "
            "2 plans for twice as many"
        )
    if contexts is not None and contexts < schedule.concurrency and simulated.again > MUCH:
        yield (
            f"the KV caches hold the conversations of {contexts} of {schedule.concurrency} agents, and {simulated.again:.0%} "
            "of all prompt tokens are computed again: fewer agents at once, or more GPUs that serve, lower that"
        )


def _contexts(costs: Costs, teams: Sequence[Team]) -> int | None:
    longest = [
        max(call.prompt + call.response for call in agent.calls)
        for team in teams
        for agent in team.agents
        if agent.calls
    ]
    if math.isinf(costs.server.kv_tokens) or not longest:
        return None
    return costs.servers * int(costs.server.kv_tokens / statistics.fmean(longest))


def share_of(config: Config, cluster: Cluster) -> float:
    """Return the share of a GPU's memory that vLLM takes, as the plugin `replicas` chooses it: its own share where no GPU
    trains and the setting has its default."""
    set_, usual = config.policy_server.gpu_memory_utilization, PolicyServerConfig().gpu_memory_utilization
    dealt = not cluster.shared and (cluster.replicas > 1 or cluster.gpus_each > 0)
    return OWN_GPU_SHARE if dealt and set_ == usual else set_


def costs_of(
    recorded: Recorded, calibration: Calibration, target: Target, teams: Sequence[Team]
) -> tuple[Costs, list[str]]:
    """Return the costs of a target and the notes on them. Raises as `make_plan` does."""
    known, shape, cluster = calibration.costs, target.shape, target.cluster
    power = known.sharing.agents * target.agents
    notes: list[str] = []
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
    share = share_of(target.config, cluster)
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
            servers=cluster.replicas,
            gateway=gateway_costs(cluster.gateways, statistics.fmean(call.prompt for call in calls) if calls else 0.0),
        ),
        [*notes, *_notes_on_gpus(recorded, target, cluster)],
    )


def _notes_on_gpus(recorded: Recorded, target: Target, cluster: Cluster) -> Iterator[str]:
    yield "calls are as many and as long as those of the recorded model"
    if forward_passes(recorded) is None:
        yield (
            "the record does not say what the algorithm computes before a step's gradient: passes for a reference model, a "
            "loss of whole steps or a critic are not in the seconds of training"
        )
    if (size := _size(target.schedule)) < target.schedule.concurrency and not target.schedule.max_staleness:
        yield (
            f"a step has {size} rollouts, so {target.schedule.concurrency - size} of {target.schedule.concurrency} agents "
            "never run: raise trainer.tasks_per_step or --group-size"
        )
    yield from uncounted(target.config.engine, cluster.training)


def _phases(simulated: Simulated) -> Phases:
    return Phases(
        simulated.mean(lambda step: step.rollout),
        simulated.mean(lambda step: step.train),
        simulated.mean(lambda step: step.checkpoint),
        simulated.mean(lambda step: step.update),
    )
