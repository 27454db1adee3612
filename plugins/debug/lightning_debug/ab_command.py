"""`lightning ab`: which of two prompts, models or temperatures is better for an agent.

The invariant: the exit code says it to a program. 0: B is better; 4: A is better; 3: they were not told apart; 2: an error. 1
says nothing of the variants: it is that of a crash.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from lightning.asyncio_utils import run_to_end
from lightning.cli.locate import load_agent
from lightning.cli.output import AsJson, escape, print_json, print_table, say, stoppable
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.store.places import existing_store
from lightning.trainer.summary import Reporter
from lightning_branching.policies import find_model
from lightning_branching.prompt_texts import read_prompt, warn_of_name

from lightning_debug.ab import Comparison, compare, promote, shuffled
from lightning_debug.eval_command import (
    AgentName,
    Bounds,
    ConfigFile,
    Resume,
    Runner,
    Runs,
    Set,
    Tasks,
    read_all,
    read_bounds,
    read_settings,
    timestamp,
)
from lightning_debug.evaluate import Setup, Variant

EXIT_CODES: Final = {"B": 0, "A": 4, "": 3}
"""By who is better."""
EXAMPLE: Final = "give one of --prompt NAME=a.txt,b.txt, --model A,B and --temperature 0.2,1.0 two values"


def ab(
    agent: AgentName,
    tasks: Tasks,
    model: Annotated[
        str,
        typer.Option(help="The model, each as for `lightning eval`: one for both variants, or A,B to compare two."),
    ],
    prompt: Annotated[
        str, typer.Option(metavar="NAME=A.txt,B.txt", help="Compare two texts as the prompt of a component.")
    ] = "",
    temperature: Annotated[
        str, typer.Option(metavar="A,B", help="Compare two sampling temperatures; one: that of both variants.")
    ] = "",
    n: Annotated[int, typer.Option("-n", min=1, help="Rollouts of each task under each variant.")] = 1,
    max_rollouts: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of rollouts, of both variants together; default: all tasks."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Tasks between two looks at the result.")] = None,
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
    runner: Runner = "process",
    as_json: AsJson = False,
    config: ConfigFile = None,
    set_: Set = None,
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
    if promote_to and a.prompt is None and a.model.folder == b.model.folder:
        raise ConfigError("--promote: a temperature is no resource. Set trainer.eval_temperature to the better one")
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
        show(found, folder, a, b)
        if done:
            say(escape(done))
    raise typer.Exit(EXIT_CODES[found.better])


def _promoted(place: str, winner: Variant | None, alias: str, found: Comparison) -> str:
    """Promote the winner, if there is one, and say what was done."""
    if winner is None:
        return "nothing is promoted, since the variants were not told apart"
    return asyncio.run(promote(existing_store(place), winner, alias, found))


def variants(
    folder: Path, model: str, prompt: str, temperature: str, settings: Config, runs: Path
) -> tuple[Variant, Variant]:
    """Both variants, as the options name them. Raises `ConfigError` unless they differ in just one thing."""
    models, temperatures = model.split(","), temperature.split(",") if temperature else []
    name, equals, files = prompt.partition("=")
    texts = files.split(",") if prompt else []
    if prompt and not (name and equals and len(texts) == 2):
        raise ConfigError(f"--prompt {prompt!r}: write NAME=A.txt,B.txt, the component's name and two files")
    pairs = [len(models) == 2, len(texts) == 2, len(temperatures) == 2]
    if sum(pairs) != 1 or len(models) > 2 or len(temperatures) > 2:
        raise ConfigError(
            f"an A/B compares two variants that differ in one thing, and here are {sum(pairs)}: {EXAMPLE}"
        )
    base = folder.resolve().name
    found = [find_model(each.strip(), runs, folder / "models", settings) for each in dict.fromkeys(models)]
    made = [Variant(f"{base}.{side}", found[0], settings, label=found[0].name) for side in ("a", "b")]
    if len(models) == 2:
        alike = found[0].name == found[-1].name
        made = [
            replace(each, model=model, label=model.title if alike else model.name)
            for each, model in zip(made, (found[0], found[-1]), strict=True)
        ]
        if found[0].folder == found[-1].folder:
            raise ConfigError(f"--model {model!r}: both are the same model, {found[0].folder}")
    for place in range(2) if temperatures else ():
        value = _temperature(temperatures[min(place, len(temperatures) - 1)])
        changed = with_settings(made[place].config, {"trainer.eval_temperature": value})
        made[place] = replace(made[place], config=changed)
        if len(temperatures) == 2:
            made[place] = replace(made[place], label=f"temperature {value:g}")
    if len(temperatures) == 2 and made[0].config == made[1].config:
        raise ConfigError(f"--temperature {temperature}: both are the same")
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


def show(found: Comparison, folder: Path, a: Variant, b: Variant) -> None:
    """A comparison in words and tables."""
    say(f"A: {escape(found.a)}   mean reward {found.mean_a:.3f}{_failed(found, 'A')}")
    say(f"B: {escape(found.b)}   mean reward {found.mean_b:.3f}{_failed(found, 'B')}")
    low, high = found.interval
    interval = f"95 % interval {low:+.3f} to {high:+.3f}"
    say(f"B - A: {found.difference:+.3f}, {interval} (it holds at any time), p = {found.p_value:.2g}")
    winner = f"[bold]{found.better} is better[/bold]" if found.better else "A and B were not told apart"
    say(f"{winner}, after {found.tasks} tasks and {found.rollouts} of {found.planned} rollouts")
    if not found.better:
        say("more tasks, or more rollouts of each (-n), tell smaller differences apart")
    if found.lost_pairs:
        say(f"[red]{found.lost_pairs} pairs were lost to the infrastructure and are in no figure")
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
    say(f"what was recorded: `lightning runs show {escape(a.run)} --runs {escape(str(folder))}`, and {escape(b.run)}")


def _failed(found: Comparison, side: str) -> str:
    faults = found.failed[side]
    said = ", ".join(f"{fault} {count}" for fault, count in faults.items())
    lowest = f"[red]; {sum(faults.values())} failed (by fault of: {said}), which is {found.bounds[0]:g}"
    return f"{lowest} unless it was the infrastructure's[/red]" if faults else ""
