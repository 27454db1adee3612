"""Divides a cluster's GPUs between training and several policy servers, and says what each part of the division gains.

The invariant: a division is chosen by simulated trained tokens a second, among those whose memory fits; its settings are those
that a run takes.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning_verl.config import VerlConfig

from lightning_planner.calibration import Calibration
from lightning_planner.cluster import Cluster
from lightning_planner.costs import Team
from lightning_planner.memory import kv_tokens, memory, training_items
from lightning_planner.planner import Plan, Target, costs_of, make_plan, share_of
from lightning_planner.recorded import Recorded
from lightning_planner.shape import Shape
from lightning_planner.speed import dividing

SIMULATED = 3
"""How many divisions are simulated: those that are estimated to be the fastest."""
STEPS = 6
"""The most steps of these simulations, and of those of the parts."""
GATEWAYS = (1, 4)
"""Numbers of gateway processes that are compared with none."""
RANK = 16
"""The rank of the adapters that are compared with whole weights."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A plan with the `part`, and with all parts before it."""

    part: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Division:
    """A chosen division of a cluster: its settings (`policy_server.replicas=4`), the commands that train so, and what each part
    of it gains."""

    cluster: Cluster
    settings: tuple[str, ...]
    commands: tuple[str, ...]
    gains: tuple[Gain, ...]


def divided(recorded: Recorded, calibration: Calibration, target: Target, given: Sequence[str] = ()) -> Division:
    """Divide the target's cluster. The commands also have the settings that were `given`. Raises as `divide` does."""
    cluster = divide(recorded, calibration, target)
    settings = settings_of(cluster, target.config)
    names = {each.partition("=")[0] for each in settings}
    own = [each for each in given if each.partition("=")[0] not in names]
    chosen = replace(target, cluster=cluster)
    return Division(cluster, settings, commands_of(cluster, [*own, *settings]), gains(recorded, calibration, chosen))


def divide(recorded: Recorded, calibration: Calibration, target: Target) -> Cluster:
    """Return the division of the target's cluster that trains most tokens a second, by simulation.

    Raises `ConfigError` where no division has room for training, or none for the KV cache of the longest call.
    """
    teams = [target.changes.apply(team) for team in calibration.steady]
    shape, whole = _planned(target)
    found = list(_divisions(shape, whole, target, teams))
    if not found:
        raise ConfigError(_why_none(shape, whole, target.config))
    found.sort(key=lambda cluster: _estimate(recorded, calibration, replace(target, cluster=cluster), teams))
    plans = [
        (cluster, make_plan(recorded, calibration, _short(replace(target, cluster=cluster))))
        for cluster in found[:SIMULATED]
    ]
    return max(plans, key=lambda pair: pair[1].tokens_per_second)[0]


def gains(recorded: Recorded, calibration: Calibration, target: Target) -> tuple[Gain, ...]:
    """Return what the parts of the target's division gain, one after another: from one policy server and the trainer's gateway
    to several servers, gateway processes, and adapters alone."""
    shape, cluster = _planned(target)
    plain = replace(cluster, gateways=0)
    parts = [
        (f"{named(each)}{' (chosen)' * (each == plain)}", replace(target, cluster=each))
        for each in _servings(shape, plain, target.config)
    ]
    for number in GATEWAYS:
        name = f"chosen, with {counted(number, 'gateway process', 'gateway processes')}"
        parts.append((name, replace(target, cluster=replace(plain, gateways=number))))
    if target.config.engine.lora is None:
        config = with_settings(target.config, {"engine.lora.rank": RANK})
        parts.append((f"and adapters alone (engine.lora.rank={RANK})", replace(parts[-1][1], config=config)))
    return tuple(Gain(name, make_plan(recorded, calibration, _short(part))) for name, part in parts)


def _servings(shape: Shape, cluster: Cluster, config: Config) -> list[Cluster]:
    """Return the ways to serve on the GPUs of a cluster, from one server to many; where one server cannot have all of them, it
    has as many as it can."""
    serving = cluster.serving or cluster.gpus
    found = [
        replace(cluster, replicas=serving // each, gpus_each=each)
        for each in reversed(dividing(shape, serving))
        if not serving % each
    ]
    if found[0].replicas > 1:
        found.insert(0, _alone(cluster, max(dividing(shape, serving))))
    return [each for each in found if each == cluster or _room(shape, each, config) > 0]


def settings_of(cluster: Cluster, config: Config) -> tuple[str, ...]:
    """Return the settings of a run that has this division of a machine's GPUs, as KEY=VALUE."""
    taken = cluster.replicas * cluster.server_gpus
    first = 1 if cluster.training == 1 and not cluster.shared else 0  # the torch engine has GPU 0
    gpus = ", ".join(str(number) for number in range(first, first + taken))
    workers = [f"engine.verl.world_size={cluster.training}"] if cluster.training > 1 else []
    address = ["engine.verl.address=auto"] if cluster.training > 1 and not cluster.shared else []
    return (
        "engine.device=cuda",
        *workers,
        *address,
        f"policy_server.replicas={cluster.replicas}",
        f"policy_server.gpus_each={cluster.server_gpus}",
        f"policy_server.gpus=[{gpus}]",
        f"policy_server.gpu_memory_utilization={share_of(config, cluster):g}",
        f"gateway.processes={cluster.gateways}",
    )


def commands_of(cluster: Cluster, settings: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that train with these settings on one machine: verl's workers have the GPUs behind the servers'."""
    words = " ".join(f"--set {shlex.quote(each)}" for each in settings)
    if cluster.training == 1:
        return (f"lightning train ... {words}",)
    train = f"lightning train ... --engine verl {words}"
    if cluster.shared:
        return (train,)
    ours, theirs = (
        ",".join(map(str, numbers)) for numbers in (range(cluster.serving), range(cluster.serving, cluster.gpus))
    )
    return (
        f"CUDA_VISIBLE_DEVICES={theirs} ray start --head --num-gpus={cluster.training}",
        f"CUDA_VISIBLE_DEVICES={ours} {train}",
    )


def _planned(target: Target) -> tuple[Shape, Cluster]:
    if target.shape is None or target.cluster is None:
        raise ValueError("only a target with a model and a cluster can be divided")
    return target.shape, target.cluster


def _short(target: Target) -> Target:
    return replace(target, schedule=replace(target.schedule, steps=min(target.schedule.steps, STEPS)))


def _alone(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with one policy server on so many GPUs, and as many for training."""
    if cluster.shared:
        return replace(cluster, replicas=1, gpus_each=gpus)
    return replace(cluster, gpus=cluster.training + gpus, serving=gpus, replicas=1, gpus_each=gpus)


def named(cluster: Cluster) -> str:
    """Return how many policy servers a cluster has, and on how many GPUs."""
    each = " each" if cluster.replicas > 1 else ""
    return f"{counted(cluster.replicas, 'policy server')} on {counted(cluster.server_gpus, 'GPU')}{each}"


def _room(shape: Shape, cluster: Cluster, config: Config) -> float:
    return kv_tokens(shape, cluster, share_of(config, cluster))


def _divisions(shape: Shape, whole: Cluster, target: Target, teams: Sequence[Team]) -> Iterator[Cluster]:
    """Yield the divisions whose memory fits, with a KV cache for the longest call. Where sampling goes on all the time, verl's
    workers need GPUs of their own."""
    config = target.config
    longest = max(
        (call.prompt + call.response for team in teams for agent in team.agents for call in agent.calls), default=1
    )
    for serving in range(1 if target.schedule.max_staleness else 0, whole.gpus):
        most = serving or whole.gpus
        for each in dividing(shape, most):
            if most % each:
                continue
            cluster = replace(whole, serving=serving, replicas=most // each, gpus_each=each)
            uses = memory(shape, cluster, config.engine, share_of(config, cluster))
            if all(use.fits for use in uses) and _room(shape, cluster, config) >= longest:
                yield cluster


def _why_none(shape: Shape, whole: Cluster, config: Config) -> str:
    trained = {
        ranks: sum(item.bytes for item in training_items(shape, ranks, config.engine)) / 1e9
        for ranks in range(1, whole.gpus + 1)
    }
    ranks = min(trained, key=lambda number: trained[number])
    engine, whole_gradients = config.engine, "use_no_sync_for_gradient_accumulation"
    cures = {
        "--set engine.gradient_checkpointing=true": not engine.gradient_checkpointing,
        f"--set engine.lora.rank={RANK}": engine.lora is None,
        f"--set engine.verl.sharding.{whole_gradients}=false": whole_gradients not in VerlConfig.of(engine).sharding,
        "a GPU with more memory, or more GPUs": True,
    }
    return (
        f"{shape.name} fits into no division of {whole.gpus} x {whole.gpu.name}: training takes at least "
        f"{trained[ranks]:.0f} GB of each of {ranks} GPUs, and vLLM needs GPUs or a share of them. Try "
        f"{', '.join(cure for cure, helps in cures.items() if helps)}"
    )


def _estimate(recorded: Recorded, calibration: Calibration, target: Target, teams: Sequence[Team]) -> float:
    """Return the seconds of a step if all parts were busy all the time, to tell which divisions are worth a simulation."""
    costs, _ = costs_of(recorded, calibration, target, teams)
    schedule, server, trainer = target.schedule, costs.server, costs.trainer
    agents = [agent for team in teams for agent in team.agents]
    calls = [call for agent in agents for call in agent.calls]
    rollouts = schedule.tasks_per_step * schedule.group_size
    context = statistics.fmean(call.prompt + call.response for call in calls) or 1.0
    at_once = min(schedule.concurrency, rollouts if not schedule.max_staleness else math.inf) / costs.servers
    batch = max(1.0, min(at_once, server.max_calls, server.kv_tokens / context))
    tokens = sum(call.response for call in calls) * (server.token / batch + server.token_per_call)
    missed = max(0.0, 1.0 - server.kv_tokens / context / at_once)  # of conversations that the cache has displaced
    prompts = sum(call.fresh + missed * (call.prompt - call.fresh) for call in calls) * server.prompt_token
    serving = rollouts * (tokens + prompts) / len(agents) / costs.servers
    rows = rollouts * sum(agent.rows for agent in agents) / len(agents)
    training = trainer.step + rows * trainer.row_token + trainer.update + trainer.checkpoint
    alike = schedule.max_staleness and not costs.sharing.one_device
    return max(serving, training) if alike else serving + training
