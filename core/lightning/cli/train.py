"""`lightning train`: train your own agent from the shell."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from lightning.cli.output import Overrides, SettingsFile, load_agent, next_steps, stoppable
from lightning.config import load_config
from lightning.errors import ConfigError, DataError
from lightning.plugins import plugins
from lightning.safe_text import read_text
from lightning.terminal import Terminal
from lightning.trainer import Summary, Trainer
from lightning.trainer.needs import said_of_disk
from lightning.types import Task

# Arguments and options that take more than a line.
Agent = Annotated[
    str | None,
    typer.Argument(
        help="Your agent as MODULE:FUNCTION; called with (task, llm), returns the reward. Or a program, such as "
        "command:'claude -p {task.input}'. Not needed with --runner remote."
    ),
]
Algorithm = Annotated[
    str,
    typer.Option(
        help="How the model learns: the name of an algorithm, alone or with arguments "
        "(grpo:group_size=4,kl_coefficient=0.01). Several run one after another, each with its number of "
        "steps: sft:2,grpo:20."
    ),
]
Tasks = Annotated[
    Path | None,
    typer.Option(
        help="Training tasks: a file of JSON lines, each with `input` and optionally `expected`; or a plugin's "
        "tasks as NAME:TEXT, such as harbor:FOLDER."
    ),
]
TrainAgents = Annotated[
    list[str] | None,
    typer.Option(
        "--train-agents",
        metavar="GLOB",
        help="Train only on the calls of these agents; may be repeated. !GLOB leaves agents out, model:GLOB "
        "chooses by the model that a call asks for. One set of weights answers all agents, so the others "
        "change, too.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        help="The library that trains: torch, verl (for many GPUs, with --set engine.verl.world_size=N), or a "
        "plugin's engine."
    ),
]
Runner = Annotated[
    str,
    typer.Option(
        help="Where agents run: each in a process of its own (process), in this one (inline), on machines with "
        "`lightning runner` (remote), or by a plugin's runner."
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Database URL, for several machines; default: a file in the run's folder."),
]
FromRun = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN@STEP",
        help="Start a new run from the weights and the optimizer state that another run had after a step.",
    ),
]
Recorded = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Train on recorded rollouts instead of sampling. PLACE is a run's folder, a folder of `lightning serve`, or a "
        "store's URL; add #RUN to use one run. The agent then only runs the tasks of --val.",
    ),
]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Go on with the run in --out, also under other settings; or begin a new run beside it. Default: go on if the run "
        "is unfinished and has these settings.",
        show_default=False,
    ),
]
Dev = Annotated[
    bool,
    typer.Option(
        "--dev", help="Dry run: run the agent on a few tasks without training, and report what would go wrong."
    ),
]
TasksPerStep = Annotated[
    int | None,
    typer.Option(min=1, help="Tasks in each step; each task is run group_size times (trainer.tasks_per_step)."),
]
SETTING = {"--steps": "trainer.steps", "--tasks-per-step": "trainer.tasks_per_step", "--lr": "engine.lr"}
"""The settings that have an option of their own, by option."""


def train(
    model: Annotated[str, typer.Option(help="Model folder, or a model's name on a hub.")],
    tasks: Tasks = None,
    agent: Agent = None,
    val: Annotated[Path | None, typer.Option(help="Held-out tasks, in the same format.")] = None,
    algorithm: Algorithm = "grpo",
    train_agents: TrainAgents = None,
    engine: Engine = "torch",
    runner: Runner = "process",
    store: StoreUrl = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    resume: Resume = None,
    from_run: FromRun = None,
    recorded: Recorded = None,
    dev: Dev = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of optimizer steps (trainer.steps).")] = None,
    tasks_per_step: TasksPerStep = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate (engine.lr); default: by the size of the model.")
    ] = None,
    config: SettingsFile = None,
    set_: Overrides = None,
) -> None:
    """Train the model behind your agent.

    For example: `lightning train my_app:agent --model Qwen/Qwen3-0.6B --tasks tasks.jsonl --val held_out.jsonl`
    """
    console = Terminal()
    given = {"--steps": steps, "--tasks-per-step": tasks_per_step, "--lr": lr}
    _refuse_twice({SETTING[name] for name, value in given.items() if value is not None}, set_ or [])
    trainer = Trainer(
        model,
        algorithm,
        train_agents=train_agents or (),
        engine=engine,
        runner=runner,
        store=store,
        out=out,
        resume=resume,
        from_run=from_run,
        recorded=recorded,
        config=load_config(config, set_ or []),
        steps=steps,
        tasks_per_step=tasks_per_step,
        lr=lr,
    )
    if (tasks is None) == (recorded is None):
        raise ConfigError("give --tasks to train on, or --recorded with what was recorded: one of the two")
    if dev and tasks is None:
        raise ConfigError("--dev runs the agent on a few tasks: give --tasks in place of --recorded")
    function = None if agent is None else load_agent(agent)
    train_tasks = read_tasks(tasks) if tasks is not None else []
    held_out = read_tasks(val) if val else []
    if dev:
        raise typer.Exit(0 if trainer.dev(function, train_tasks).ok else 1)
    with stoppable(lambda: f"the same command with --out {trainer.out} --resume"):
        summary = trainer.fit(function, train_tasks, held_out)
    _report(summary, trainer, console)


def _refuse_twice(given: set[str], overrides: Sequence[str]) -> None:
    """Raise `ConfigError` if an option and `--set` give the same setting."""
    if twice := sorted(given & {each.partition("=")[0].strip() for each in overrides}):
        option = next(name for name, setting in SETTING.items() if setting == twice[0])
        raise ConfigError(f"{option} and --set {twice[0]} give the same setting: leave one of them out")


def _report(summary: Summary, trainer: Trainer, console: Terminal) -> None:
    from lightning.cli.report import show_summary, write_report

    write_report(summary, trainer.out)
    show_summary(summary, trainer.run_id, console)
    console.print(said_of_disk(trainer.out), markup=False, highlight=False, soft_wrap=True)
    made = "prompts" if (trainer.out / "prompts").is_dir() else "model"
    console.print(
        f"Report: {trainer.out / 'report.json'}   {made.capitalize()}: {trainer.out / made}",
        highlight=False,
        soft_wrap=True,
    )
    next_steps(
        ("see each step and rollout", ["runs", trainer.out]),
        ("learn what is wrong, if it gained little", ["advise", trainer.out]),
        *([("serve the trained model", ["serve", trainer.out])] if made == "model" else []),
    )


def read_tasks(file: Path) -> list[Task]:
    """Read tasks from a file of JSON lines, or from what a plugin knows by `NAME:TEXT`. Raises `DataError` naming file and
    line."""
    name, _, text = str(file).partition(":")
    if text and not file.exists() and name in plugins().names("tasks"):
        return list(cast("Callable[[str], Sequence[Task]]", plugins().get("tasks", name))(text))
    try:
        lines = read_text(file, DataError).split("\n")
    except OSError as error:
        raise DataError(f"cannot read tasks: {error}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number} is not JSON: {error}") from error
        if not isinstance(value, dict) or "input" not in value:
            raise DataError(f'{file}:{number} must be an object with the key "input"')
        unknown = sorted(set(value) - {"input", "expected", "metadata", "id"})
        if unknown:
            raise DataError(f"{file}:{number} has unknown keys {unknown}: put your own values under `metadata`")
        try:
            tasks.append(Task(**{key: item for key, item in value.items() if item is not None or key == "input"}))
        except (TypeError, ValueError) as error:
            raise DataError(f"{file}:{number}: {error}") from error
    if not tasks:
        raise DataError(f"{file} has no task in it")
    return tasks
