"""`lightning eval`: how good a model is at tasks, with intervals; and `lightning ab`: which of two prompts, models or
temperatures is better for an agent.

The invariant: no rollout silently counts as 0 or is silently left out; failed rollouts are counted by fault. The exit code is
2 if nothing could be measured. That of `lightning ab` says which variant is better. 0: B; 4: A; 3: neither was shown to be
better; 2: an error; 1: a crash.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from lightning.asyncio_utils import run_to_end
from lightning.cli.output import (
    AsJson,
    LocalRunner,
    Overrides,
    SettingsFile,
    escape,
    load_agent,
    next_steps,
    print_json,
    print_table,
    say,
    stoppable,
    timestamp,
)
from lightning.cli.train import read_tasks
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning.store.places import existing_store
from lightning.trainer.model import with_one_policy
from lightning.trainer.plan import as_tasks
from lightning.trainer.summary import Reporter
from lightning.types import Task
from lightning_branching.policies import EvaluatedModel, find_model
from lightning_branching.prompt_texts import read_prompt, warn_of_name

from lightning_debug.ab import Comparison, compare, promote, shuffled
from lightning_debug.evaluate import MOST_REASONS, EvalReport, Setup, Variant, evaluating, report_of
from lightning_debug.statistics import Estimate

AgentName = Annotated[
    str, typer.Argument(help="Your agent as MODULE:FUNCTION; called with (task, llm), returns the reward.")
]
Tasks = Annotated[Path, typer.Option(help="The tasks: JSON lines, each with `input` and optionally `expected`.")]
Runs = Annotated[Path, typer.Option(help="Folder of the runs that are named by their id, and of their resources.")]
Bounds = Annotated[str, typer.Option(metavar="LOW,HIGH", help="The lowest and the highest possible reward.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was stopped in --out.")]


def evaluate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="The model: a folder, a name on a hub, RUN, RUN@STEP, or a version of a run's weights "
            "([RUN#]policy/weights@ALIAS). Of a run with several policies, RUN and RUN@STEP are all of them, each for its "
            "agents, and RUN/model/NAME@STEP is one of them for all agents.",
        ),
    ],
    agent: AgentName,
    tasks: Tasks,
    n: Annotated[int, typer.Option("-n", min=1, help="Rollouts of each task.")] = 8,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; default: what the agent asks for.")
    ] = None,
    success: Annotated[float, typer.Option(help="The lowest reward that counts as a success, for pass@k.")] = 1.0,
    bounds: Bounds = "0,1",
    out: Annotated[Path | None, typer.Option(help="The evaluation's folder; default: runs/eval-TIME.")] = None,
    resume: Resume = False,
    runs: Runs = Path("runs"),
    runner: LocalRunner = "process",
    as_json: AsJson = False,
    config: SettingsFile = None,
    set_: Overrides = None,
) -> None:
    """Run an agent on tasks against a model, several times each: avg@k and pass@k with intervals."""
    limits = read_bounds(bounds)
    settings = read_settings(config, set_, temperature)
    function, listed = load_agent(agent), read_all(tasks)
    folder = out or Path("runs") / f"eval-{timestamp()}"
    model = find_model(what, runs, folder / "models", settings, together=True)
    variant = Variant(folder.resolve().name, model, model.within(settings))
    setup = Setup(function, agent, listed, n, runner, folder, resume)
    with stoppable(f"the same command with --out {folder} --resume"):
        report = run_to_end(_evaluated(setup, variant, success, limits))
    if as_json:
        print_json({"folder": str(folder), "report": report})
    else:
        show_evaluation(report, folder)


async def _evaluated(setup: Setup, variant: Variant, success: float, bounds: tuple[float, float]) -> EvalReport:
    with Reporter() as reporter:
        async with evaluating(setup, [variant], reporter) as evaluator:
            rollouts = await evaluator.run(variant, 0, len(setup.tasks))
            return report_of(variant, rollouts, setup.n, success, bounds)


def read_settings(file: Path | None, set_: list[str] | None, temperature: float | None) -> Config:
    """Read the settings, without their policies since a run's are those of its record, and set the temperature of evaluations
    unless `temperature` is None."""
    settings = with_one_policy(load_config(file, set_ or []))
    return settings if temperature is None else with_settings(settings, {"trainer.eval_temperature": temperature})


def read_all(file: Path) -> list[Task]:
    """Read the tasks of a file, each with a unique id. Raises `DataError`."""
    return as_tasks(read_tasks(file), "tasks")


def read_bounds(text: str) -> tuple[float, float]:
    """Read `LOW,HIGH` as two finite numbers. Raises `ConfigError` for any other text, and if LOW is not below HIGH."""
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


def show_evaluation(report: EvalReport, folder: Path) -> None:
    """Print the report of an evaluation as sentences and a table."""
    rewarded = f"{report.scored} of {report.rollouts} have a reward"
    model = f"{report.model} of {report.place}" if report.place else report.model
    say(f"{escape(model)}: {counted(report.tasks, 'task')} x {counted(report.n, 'rollout')}, {rewarded}")
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
        say(
            "a figure with a number of tasks leaves out tasks with too few rewards: avg@n needs one, and pass@k needs k"
        )
    say(f"pass@k: a reward of at least {report.success:g} is a success; intervals are over tasks")
    if failed:
        said = ", ".join(f"{fault} {count}" for fault, count in report.faults.items())
        say(f"[red]{counted(report.rollouts - report.scored, 'rollout')} failed, by fault of: {said}")
        for count, why in report.reasons[:MOST_REASONS]:
            say(f"  {count} x {escape(why)}")
    for warning in report.warnings:
        say(f"[yellow]{escape(warning)}")
    next_steps(("see each rollout", ["runs", "show", report.run, "--runs", folder]))


def _cells(found: Estimate | None, tasks: int) -> tuple[str, str]:
    """Return the texts of a figure and its interval. The figure names its number of tasks if some tasks are left out."""
    if found is None:
        return "-", "-"
    over = f" ({counted(found.tasks, 'task')})" if found.tasks < tasks else ""
    return f"{found.value:.3f}{over}", "-" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)


EXIT_CODES: Final = {"B": 0, "A": 4, "": 3}
"""Exit codes of `lightning ab` by the better variant; empty if neither was shown to be better."""
NOT_PROMOTED: Final = (
    "--promote works only for prompts and models, and A and B differ only in temperature: leave --promote out, and set "
    "trainer.eval_temperature to the better temperature"
)
EXAMPLE: Final = "give one of --prompt NAME=a.txt,b.txt, --model A,B and --temperature 0.2,1.0 two values"


Prompts = Annotated[
    str,
    typer.Option(metavar="NAME=A.txt,B.txt", help="Compare two texts (two files) as the prompt of the component NAME."),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Number of tasks after which the result is tested again.")]


def ab(
    agent: AgentName,
    tasks: Tasks,
    model: Annotated[
        str,
        typer.Option(help="One model for both variants, or A,B to compare two models; each as for `lightning eval`."),
    ],
    prompt: Prompts = "",
    temperature: Annotated[
        str, typer.Option(metavar="A,B", help="Compare two sampling temperatures, or give one for both variants.")
    ] = "",
    n: Annotated[int, typer.Option("-n", min=1, help="Rollouts of each task under each variant.")] = 1,
    max_rollouts: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of rollouts, of both variants together; default: all tasks."),
    ] = None,
    batch: Batch = None,
    bounds: Bounds = "0,1",
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of regressions to list.")] = 5,
    promote_to: Annotated[
        str, typer.Option("--promote", metavar="ALIAS", help="Make the winner the next version under this alias.")
    ] = "",
    store: Annotated[
        str,
        typer.Option(
            metavar="PLACE", help="Where to promote: a run's folder, a database file or a URL; default: --out."
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The comparison's folder; default: runs/ab-TIME.")] = None,
    resume: Resume = False,
    runs: Runs = Path("runs"),
    runner: LocalRunner = "process",
    as_json: AsJson = False,
    config: SettingsFile = None,
    set_: Overrides = None,
) -> None:
    """Compare two prompts, models or temperatures on the same tasks, until one is better beyond doubt.

    Exit code: 0 B is better, 4 A is better, 3 they were not told apart, 2 an error.
    """
    limits, settings = read_bounds(bounds), read_settings(config, set_, None)
    if store and not promote_to:
        raise ConfigError("--store says where to promote: give --promote ALIAS, too")
    where = existing_store(store) if store else ""  # a wrong place is told before anything runs
    function, listed = load_agent(agent), read_all(tasks)
    folder = out or Path("runs") / f"ab-{timestamp()}"
    a, b = variants(folder, model, prompt, temperature, settings, runs)
    if promote_to and a.prompt is None:
        _check_promoted(a.model, b.model)
    setup = Setup(function, agent, shuffled(listed, settings.trainer.seed), n, runner, folder, resume)
    with stoppable(f"the same command with --out {folder} --resume"), Reporter() as reporter:
        found = run_to_end(
            compare(setup, a, b, bounds=limits, most=max_rollouts, batch=batch, limit=limit, reporter=reporter)
        )
    done = (
        _promoted(where or str(folder), {"A": a, "B": b}.get(found.better), promote_to, found) if promote_to else None
    )
    if as_json:
        print_json({"folder": str(folder), "comparison": found, "promoted": done})
    else:
        show_comparison(found, folder, a, b)
        if done:
            say(escape(done))
    raise typer.Exit(EXIT_CODES[found.better])


def _check_promoted(a: EvaluatedModel, b: EvaluatedModel) -> None:
    """Raise `ConfigError` unless the better one of two models could be promoted."""
    if a.serves_as(b):
        raise ConfigError(NOT_PROMOTED)
    if several := next((each.name for each in (a, b) if each.several), ""):
        raise ConfigError(
            f"--promote promotes one model, and {several} is all policies of a run: compare one policy "
            "(--model RUN/model/NAME@STEP,...), or leave --promote out"
        )


def _promoted(place: str, winner: Variant | None, alias: str, found: Comparison) -> str:
    """Promote the winner, if there is one, and say what was done."""
    if winner is None:
        return "nothing is promoted, since the variants were not told apart"
    return asyncio.run(promote(existing_store(place), winner, alias, found))


def variants(
    folder: Path, model: str, prompt: str, temperature: str, settings: Config, runs: Path
) -> tuple[Variant, Variant]:
    """Make the variants A and B from the options. Raises `ConfigError` unless they differ in exactly one thing."""
    models, temperatures = model.split(","), temperature.split(",") if temperature else []
    name, equals, files = prompt.partition("=")
    texts = files.split(",") if prompt else []
    if prompt and not (name and equals and len(texts) == 2):
        raise ConfigError(f"--prompt {prompt!r}: write NAME=A.txt,B.txt, the component's name and two files")
    pairs = [len(models) == 2, len(texts) == 2, len(temperatures) == 2]
    if sum(pairs) != 1 or len(models) > 2 or len(temperatures) > 2:
        raise ConfigError(
            f"an A/B compares two variants that differ in one thing, and these differ in {sum(pairs)}: {EXAMPLE}"
        )
    base = folder.resolve().name
    found = [
        find_model(each.strip(), runs, folder / "models", settings, together=True) for each in dict.fromkeys(models)
    ]
    made = [
        Variant(f"{base}.{side}", each, each.within(settings), label=each.name)
        for side, each in (("a", found[0]), ("b", found[-1]))
    ]
    if len(models) == 2:
        alike = found[0].name == found[-1].name
        made = [replace(each, label=each.model.title if alike else each.model.name) for each in made]
        if found[0].serves_as(found[-1]):
            raise ConfigError(f"--model {model!r}: both are the same model, {found[0].folder}")
    for place in range(2) if temperatures else ():
        value = _temperature(temperatures[min(place, len(temperatures) - 1)])
        changed = with_settings(made[place].config, {"trainer.eval_temperature": value})
        made[place] = replace(made[place], config=changed)
        if len(temperatures) == 2:
            made[place] = replace(made[place], label=f"temperature {value:g}")
    if len(temperatures) == 2 and made[0].config == made[1].config:
        raise ConfigError(f"--temperature {temperature}: both temperatures are the same")
    if texts:
        warn_of_name(name, "the first batch will tell")
        both = [read_prompt(Path(file)) for file in texts]
        if both[0] == both[1]:
            raise ConfigError(f"--prompt: the texts in {texts[0]} and {texts[1]} are the same")
        made = [
            replace(each, prompt=(name, text), label=f"{name}={file}")
            for each, text, file in zip(made, both, texts, strict=True)
        ]
    return made[0], made[1]


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"--temperature {text!r}: give numbers from 0 up, as 0.2,1.0")
    return value


def show_comparison(found: Comparison, folder: Path, a: Variant, b: Variant) -> None:
    """Print the result of an A/B test as sentences and tables."""
    say(f"A: {escape(found.a)}   mean reward {found.mean_a:.3f}{_failed(found, 'A')}")
    say(f"B: {escape(found.b)}   mean reward {found.mean_b:.3f}{_failed(found, 'B')}")
    low, high = found.interval
    interval = f"95 % interval {low:+.3f} to {high:+.3f}"
    say(f"B - A: {found.difference:+.3f}, {interval} (it holds at any time), p = {found.p_value:.2g}")
    winner = f"[bold]{found.better} is better[/bold]" if found.better else "A and B were not told apart"
    say(f"{winner}, after {counted(found.tasks, 'task')} and {found.rollouts} of {counted(found.planned, 'rollout')}")
    if not found.better:
        say("more tasks, or more rollouts of each (-n), tell smaller differences apart")
    if found.lost_pairs:
        ends = ("was lost to the infrastructure and is", "were lost to the infrastructure and are")
        lost = counted(found.lost_pairs, f"pair {ends[0]}", f"pairs {ends[1]}")
        say(f"[red]{lost} in no figure")
    if found.regressions:
        print_table(
            ["task", "A", "B", "rollout under A", "rollout under B"],
            [
                [escape(each.task), f"{each.a:.3f}", f"{each.b:.3f}", escape(each.rollout_a), escape(each.rollout_b)]
                for each, _ in found.regressions
            ],
            title="worst regressions",
        )
    for each, call in found.regressions:
        if call is None:
            say(f"{escape(each.task)}: no call differs; the agent's own code or its tools gave another reward")
            continue
        said = f"call {call.number} ({escape(call.caller)}) is the first that differs, in {escape(call.where)}"
        say(f"{escape(each.task)}: {said}:\n  A: {escape(call.a)}\n  B: {escape(call.b)}")
    next_steps(
        ("see each rollout under A", ["runs", "show", a.run, "--runs", folder]),
        ("see each rollout under B", ["runs", "show", b.run, "--runs", folder]),
    )


def _failed(found: Comparison, side: str) -> str:
    faults = found.failed[side]
    said = ", ".join(f"{fault} {count}" for fault, count in faults.items())
    lowest = f"[red]; {sum(faults.values())} failed (by fault of: {said}) and count as {found.bounds[0]:g}"
    return f"{lowest}, but those by fault of the infrastructure are left out[/red]" if faults else ""
