"""`lightning eval`: how good a model is at tasks, with intervals.

The invariant: no rollout is silently 0 or silently left out; what failed is counted by whose fault it was. Exit code 2 where
nothing could be measured.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from lightning.asyncio_utils import run_to_end
from lightning.cli.locate import load_agent
from lightning.cli.output import AsJson, escape, print_json, print_table, say, stoppable
from lightning.cli.train import read_tasks
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError
from lightning.trainer.plan import as_tasks
from lightning.trainer.summary import Reporter
from lightning.types import Task
from lightning_branching.policies import find_model

from lightning_debug.evaluate import MOST_REASONS, EvalReport, Evaluator, Setup, Variant, report_of
from lightning_debug.statistics import Estimate

AgentName = Annotated[
    str, typer.Argument(help="Your agent as MODULE:FUNCTION; called with (task, llm), returns the reward.")
]
Tasks = Annotated[Path, typer.Option(help="The tasks: JSON lines, each with `input` and optionally `expected`.")]
Runs = Annotated[Path, typer.Option(help="Folder in which runs and their resources are looked for by name.")]
Bounds = Annotated[str, typer.Option(metavar="LOW,HIGH", help="The lowest and the highest reward that there can be.")]
Runner = Annotated[str, typer.Option(help="What runs agents: process or inline, or a plugin's.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what was begun in --out.")]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]


def evaluate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A model folder or hub name; RUN or RUN@STEP; or a version of a run's weights: [RUN#]policy/weights@ALIAS.",
        ),
    ],
    agent: AgentName,
    tasks: Tasks,
    n: Annotated[int, typer.Option("-n", min=1, help="Rollouts of each task.")] = 8,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; default: what the agent asks for.")
    ] = None,
    success: Annotated[float, typer.Option(help="The reward from which on a rollout is a success, for pass@k.")] = 1.0,
    bounds: Bounds = "0,1",
    out: Annotated[Path | None, typer.Option(help="The evaluation's folder; default: runs/eval-TIME.")] = None,
    resume: Resume = False,
    runs: Runs = Path("runs"),
    runner: Runner = "process",
    as_json: AsJson = False,
    config: ConfigFile = None,
    set_: Set = None,
) -> None:
    """Run an agent on tasks against a model, several times each: avg@k and pass@k with intervals."""
    limits = read_bounds(bounds)
    settings = read_settings(config, set_, temperature)
    function, listed = load_agent(agent), read_all(tasks)
    folder = out or Path("runs") / f"eval-{timestamp()}"
    model = find_model(what, runs, folder / "models", settings)
    variant = Variant(folder.resolve().name, model, settings)
    setup = Setup(function, agent, listed, n, runner, folder, resume)
    with stoppable(f"the same command with --out {folder} --resume"):
        report = run_to_end(_evaluated(setup, variant, success, limits))
    if as_json:
        print_json({"folder": str(folder), "report": report})
    else:
        show(report, folder)


async def _evaluated(setup: Setup, variant: Variant, success: float, bounds: tuple[float, float]) -> EvalReport:
    with Reporter() as reporter:
        async with Evaluator(setup, [variant], reporter) as evaluator:
            rollouts = await evaluator.run(variant, 0, len(setup.tasks))
            report = report_of(variant, rollouts, setup.n, success, bounds)
            await evaluator.close_runs()
            return report


def read_settings(file: Path | None, set_: list[str] | None, temperature: float | None) -> Config:
    """The settings, with the temperature of evaluations where one is given."""
    settings = load_config(file, set_ or [])
    return settings if temperature is None else with_settings(settings, {"trainer.eval_temperature": temperature})


def read_all(file: Path) -> list[Task]:
    """The tasks of a file, each with an id of its own. Raises `DataError`."""
    return as_tasks(read_tasks(file), "tasks")


def read_bounds(text: str) -> tuple[float, float]:
    """`LOW,HIGH` as numbers. Raises `ConfigError`."""
    parts = text.split(",")
    try:
        low, high = (float(part) for part in parts)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--bounds {text!r}: give two numbers, the lowest and the highest reward, as 0,1") from None
    if not low < high:
        raise ConfigError(f"--bounds {text!r}: the lowest reward must be below the highest")
    return low, high


def timestamp() -> str:
    """Now, for a folder's name."""
    return datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")


def show(report: EvalReport, folder: Path) -> None:
    """An evaluation in words and a table."""
    rewarded = f"{report.scored} of {report.rollouts} have a reward"
    model = f"{report.model} of {report.place}" if report.place else report.model
    say(f"{escape(model)}: {report.tasks} tasks x {report.n} rollouts, {rewarded}")
    columns = ["", "over those with a reward", "95 % interval"]
    failed = bool(report.faults)
    print_table(
        [*columns, f"with the failed as {report.lowest:g}", "95 % interval"] if failed else columns,
        [
            [
                measure.name,
                *_cells(measure.scored, report.tasks),
                *(_cells(measure.with_failures, report.tasks) if failed else ()),
            ]
            for measure in report.measures
        ],
    )
    if any(each.scored and each.scored.tasks < report.tasks for each in report.measures):
        say("a figure with a number of tasks leaves out those with fewer rewards than it needs (avg@n one, pass@k k)")
    say(f"pass@k: a reward of at least {report.success:g} is a success; intervals are over tasks")
    if failed:
        said = ", ".join(f"{fault} {count}" for fault, count in report.faults.items())
        say(f"[red]{report.rollouts - report.scored} rollouts failed, by fault of: {said}")
        for count, why in report.reasons[:MOST_REASONS]:
            say(f"  {count} x {escape(why)}")
    for warning in report.warnings:
        say(f"[yellow]{escape(warning)}")
    say(f"what was recorded: `lightning runs show {escape(report.run)} --runs {escape(str(folder))}`")


def _cells(found: Estimate | None, tasks: int) -> tuple[str, str]:
    """A figure and its interval; with how many tasks it is over where those are not all."""
    if found is None:
        return "-", "-"
    over = f" ({found.tasks} tasks)" if found.tasks < tasks else ""
    return f"{found.value:.3f}{over}", "-" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
