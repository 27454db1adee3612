"""`lightning plan`: simulates a run on other machines, or with other settings.

The invariant: it only reads, and all its output begins by saying that it is a simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.output import AsJson, escape, locate, next_steps, print_json, print_table, run_words, say, with_store
from lightning.config import Config, load_config
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning_replicas.config import ReplicasConfig
from lightning_server.config import GatewayProcessesConfig

from lightning_planner.cluster import Assumptions, Cluster, Gpu, assume, find_gpu
from lightning_planner.costs import Changes
from lightning_planner.division import Division, divided, named
from lightning_planner.gateways import MEASURED
from lightning_planner.needs import with_all_adapters
from lightning_planner.planner import (
    LABEL,
    Plan,
    Replay,
    Target,
    calibrated,
    make_plan,
)
from lightning_planner.recorded import Recorded, read_run, recorded_config, schedule_of
from lightning_planner.shape import Shape, read_shape

Staleness = Annotated[
    list[int] | None,
    typer.Option("--max-staleness", metavar="K", help="trainer.max_staleness; repeat it to compare values."),
]
ServeOn = Annotated[
    int | None,
    typer.Option(
        min=0, help="Number of GPUs that only serve; with 0, all GPUs train. Left out, the plan divides them."
    ),
]
Assumed = Annotated[
    list[str] | None,
    typer.Option("--assume", metavar="NAME=NUMBER", help="Replace an assumption, such as train_mfu=0.4."),
]


def plan(
    run: Annotated[str, typer.Argument(help="The recorded run: its folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    model: Annotated[
        str, typer.Option(help="Model to plan for: a folder, a config.json, or a name on a hub. Needs --gpus.")
    ] = "",
    gpus: Annotated[
        int, typer.Option(min=0, help="Number of GPUs in the cluster; 0 plans for the machine of the recorded run.")
    ] = 0,
    gpu: Annotated[
        str, typer.Option(help="h100, h200, a100, or memory=GB,tflops=N,bandwidth=TB/s[,link=GB/s].")
    ] = "h100",
    serve_on: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of GPUs that only serve; with 0, all GPUs train. Left out, the plan divides them."
        ),
    ] = None,
    group_size: Annotated[int, typer.Option(min=0, help="Rollouts per task; 0: as recorded.")] = 0,
    max_staleness: Staleness = None,
    tool_seconds: Annotated[float, typer.Option(min=0, help="Seconds added to each tool run.")] = 0.0,
    tool_scale: Annotated[float, typer.Option(min=0, help="Factor on the duration of tool runs.")] = 1.0,
    token_scale: Annotated[float, typer.Option(help="Factor on the tokens of each call.")] = 1.0,
    agents: Annotated[int, typer.Option(min=0, help="Agents that run at once; 0: as runner.concurrency says.")] = 0,
    agent_machines: Annotated[float, typer.Option(help="Factor on the machines that run agents.")] = 1.0,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps to simulate.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed for drawing the groups.")] = 0,
    assume_: Assumed = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recorded run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run from a recorded one: seconds per step, memory of each GPU, utilisation and staleness."""
    _check(model, gpus, max_staleness or (), (token_scale, agent_machines))
    shape = read_shape(model) if model else None
    url, run_id = locate(run, runs)
    recorded = asyncio.run(with_store(url, lambda store: read_run(store, run_id)))
    calibration, played = calibrated(recorded)
    given = [*(set_ or ()), *_as_settings(agents, max_staleness or ())]
    config = with_all_adapters(load_config(overrides=given, env={}, base=recorded_config(recorded.config)))
    cluster = _cluster(config, find_gpu(gpu), gpus, serve_on, assume(assume_ or ())) if gpus else None
    schedule = schedule_of(
        config,
        group_size=group_size or recorded.schedule.group_size,
        dynamic_sampling=recorded.schedule.dynamic_sampling,
        steps=steps,
    )
    bounds = max_staleness or [schedule.max_staleness]
    changes = Changes(tool_seconds, tool_scale, token_scale)
    target = Target(replace(schedule, max_staleness=bounds[0]), config, changes, agent_machines, shape, cluster, seed)
    division = divided(recorded, calibration, target, given) if gpus > 1 and serve_on is None else None
    target = target if division is None else replace(target, cluster=division.cluster)
    plans = [make_plan(recorded, calibration, target.with_staleness(bound)) for bound in bounds]
    if as_json:
        print_json(_document(recorded, played, plans, target, division))
    else:
        _show(recorded, played, plans, target, division)
        next_steps(("see where the recorded run's time went", ["profile", *run_words(run, runs)]))


def _as_settings(agents: int, bounds: Sequence[int]) -> list[str]:
    """Return the settings that options stand for: the number of agents at once, and the first of the bounds on staleness."""
    staleness = [f"trainer.max_staleness={bound}" for bound in bounds[:1]]
    return [*([f"runner.concurrency={agents}"] if agents else []), *staleness]


def _cluster(config: Config, gpu: Gpu, gpus: int, serve_on: int | None, assumptions: Assumptions) -> Cluster:
    """Return the cluster as the settings divide it; undivided where `serve_on` is None."""
    processes = GatewayProcessesConfig.of(config).processes
    gateways = int(assumptions.gateway_processes) if processes is None else processes
    if serve_on is None:
        return Cluster(gpu, gpus, gateways=gateways, assumptions=assumptions)
    replicas = ReplicasConfig.of(config)
    each = replicas.gpus_each or int(replicas.replicas > 1)
    return Cluster(gpu, gpus, serve_on, replicas.replicas, each, gateways, assumptions)


def _check(model: str, gpus: int, bounds: Sequence[int], factors: Sequence[float]) -> None:
    """Raise `ConfigError` for impossible options."""
    if min(factors) <= 0:
        raise ConfigError("--token-scale and --agent-machines are factors above 0")
    if negative := [bound for bound in bounds if bound < 0]:
        raise ConfigError(f"--max-staleness {negative[0]}: it is a number of steps, 0 or more")
    if bool(model) != bool(gpus):
        raise ConfigError(
            "a plan for other machines needs both --model and --gpus; without them it is for the recorded one"
        )


def _document(
    recorded: Recorded, played: Replay, plans: Sequence[Plan], target: Target, division: Division | None
) -> dict[str, object]:
    return {
        "label": LABEL,
        "run": recorded.run,
        "replay": {
            "recorded": played.recorded,
            "simulated": played.simulated,
            "error": played.error,
            "calls": played.calls,
        },
        "model": target.shape,
        "cluster": target.cluster,
        "division": division,
        "plans": [
            {"plan": one, "seconds_per_step": one.step.total, "fits": all(use.fits for use in one.memory)}
            for one in plans
        ],
    }


def _show(recorded: Recorded, played: Replay, plans: Sequence[Plan], target: Target, division: Division | None) -> None:
    say(f"[bold yellow]{LABEL}[/]; calibrated on {escape(recorded.run)}, {counted(len(recorded.steps), 'step')}")
    print_table(
        ["seconds of a step", "recorded", "played back"],
        [
            *(
                [phase, f"{getattr(played.recorded, phase):.2f}", f"{getattr(played.simulated, phase):.2f}"]
                for phase in ("rollout", "train", "checkpoint", "update")
            ),
            ["all", f"{played.recorded.total:.2f}", f"{played.simulated.total:.2f} ({played.error:+.0%})"],
        ],
    )
    say("")
    _show_plans(plans, _where(target.shape, target.cluster))
    if division is not None:
        _show_division(division)
    if plans and plans[0].memory:
        say("")
        for use in plans[0].memory:
            verdict = "[green]fits" if use.fits else "[red]does not fit"
            print_table(
                ["memory of a GPU, GB", "", "from"],
                [
                    *([item.name, f"{item.bytes / 1e9:.1f}", escape(item.how)] for item in use.items),
                    ["all", f"[bold]{use.used / 1e9:.1f}", f"of {use.available / 1e9:.0f}: {verdict}"],
                ],
                title=escape(use.role),
            )
    for note in dict.fromkeys(note for one in plans for note in one.notes):
        say(f"[yellow]note[/] {escape(note)}")
    if (cluster := target.cluster) is not None:
        say("")
        _show_sources(recorded, cluster, plans[0].costs.gateway.call)
        print_table(
            ["assumed", "", "--assume NAME=NUMBER changes it"],
            [[name, f"{value:g}", escape(why)] for name, value, why in cluster.assumptions.listed()],
        )


def _where(shape: Shape | None, cluster: Cluster | None) -> str:
    if shape is None or cluster is None:
        return "the machine of the recorded run"
    how = "all train" if cluster.shared else f"{cluster.training} train"
    return (
        f"{shape.name} ({shape.parameters / 1e9:.2f} B) on {cluster.gpus} x {cluster.gpu.name}: {how}, {named(cluster)}"
    )


def _show_division(division: Division) -> None:
    """Print what each part of a division gains, and the settings and commands of it."""
    say("")
    print_table(
        ["what each part gains", *_GAINS],
        [[gain.part, *(shown(gain.plan) for shown in _GAINS.values())] for gain in division.gains],
    )
    say("\nto train so:")
    for command in division.commands:
        say(f"  [bold]{escape(command)}")


_GAINS: Mapping[str, Callable[[Plan], str]] = {
    "trained tokens/s": lambda plan: f"{plan.tokens_per_second:.0f}",
    "step, s": lambda plan: f"{plan.step.total:.1f}",
    "update, s": lambda plan: f"{plan.step.update:.1f}",
    "contexts that fit": lambda plan: "unknown" if plan.contexts is None else str(plan.contexts),
    "prompts again": lambda plan: f"{plan.again:.0%}",
    "calls/s": lambda plan: f"{plan.calls:.1f}",
    "gateway's most": lambda plan: f"{plan.costs.gateway.most:.0f}",
}
"""The numbers of a part of a division, by their titles."""


def _show_sources(recorded: Recorded, cluster: Cluster, call: float) -> None:
    """Say of each kind of number whether it was measured, read or simulated."""
    print_table(
        ["where the numbers come from", ""],
        [
            ["recorded", escape(f"calls, tokens, tools and the work of agents: {recorded.run}")],
            ["measured elsewhere", escape(f"{1000 * call:.1f} ms of the gateway's CPU for a call: {MEASURED}")],
            [
                "read",
                escape(
                    f"{cluster.gpu.name}: its data sheet; operations and bytes of a token: the papers in docs/planning.md"
                ),
            ],
            ["simulated", "every other number: no run on several GPUs was compared with a plan"],
        ],
    )


def _show_plans(plans: Sequence[Plan], where: str) -> None:
    schedule = plans[0].schedule
    groups = (
        f"{counted(schedule.tasks_per_step, 'group')} of {schedule.group_size} a step, "
        f"{counted(schedule.concurrency, 'agent')} at once"
    )
    print_table(
        ["simulated", *(f"max_staleness {one.schedule.max_staleness}" for one in plans)],
        [
            ["seconds of a step", *(f"[bold]{one.step.total:.2f}" for one in plans)],
            ["  waiting for rollouts", *(f"{one.step.rollout:.2f}" for one in plans)],
            ["  training", *(f"{one.step.train:.2f}" for one in plans)],
            ["  checkpoint", *(f"{one.step.checkpoint:.2f}" for one in plans)],
            ["  update", *(f"{one.step.update:.2f}" for one in plans)],
            ["trained tokens a second", *(f"{one.tokens_per_second:.0f}" for one in plans)],
            ["staleness, mean / max", *(f"{one.staleness_mean:.2f} / {one.staleness_max}" for one in plans)],
            ["policy servers busy", *(f"{one.server_busy:.0%}" for one in plans)],
            ["calls decoded at once", *(f"{one.batch:.1f}" for one in plans)],
            ["places busy", *(f"{one.places_busy:.0%} of {one.schedule.concurrency}" for one in plans)],
            ["trainer busy", *(f"{one.trainer_busy:.0%}" for one in plans)],
        ],
        title=escape(f"{where}; {groups}"),
    )
