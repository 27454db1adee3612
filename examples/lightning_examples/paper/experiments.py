"""The three experiments, and what a trainer needs for each of them: at full size, or at a size for two cores.

The invariant: nothing here reads data or imports an agent's framework before `set_up` is called, so that what is missing can be
listed first.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from lightning.cli.train import read_tasks
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError, MissingExtraError
from lightning.plugins import plugins

from lightning_examples.paper.recipe import CLUSTERS, TRAIN, VAL, Recipe, full_size

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm
    from lightning.runner.protocol import Agent
    from lightning.types import Task

Size = Literal["full", "cores"]
SIZES: tuple[Size, ...] = get_args(Size)
MODEL = "Qwen/Qwen3-4B"
PAPER_MODEL = "meta-llama/Llama-3.2-3B-Instruct"
TRAIN_TASKS = 4000
"""Training tasks to draw from at the size `cores`, as in `lightning demo`."""
HELD_OUT = 200
"""Held-out tasks at the size `cores`, as in `lightning demo`."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of the paper. `demo` is the demonstration of its agent on two cores. `extras` are the agent's. `tasks` and
    `held_out` are how many tasks `prepare` writes, or a few more. `differs` are (setting, as published, as here)."""

    name: str
    title: str
    demo: str
    extras: tuple[str, ...]
    tasks: int
    held_out: int
    differs: tuple[tuple[str, str, str], ...]


_GROUPS = ("rollouts of a task", "4, in the authors' released example", "8")
EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (
        Experiment("spider", "Spider, LangChain: text-to-SQL", "sql", ("langchain",), 7000, 500, (_GROUPS,)),
        Experiment(
            "musique",
            "MuSiQue, OpenAI Agents SDK: retrieval",
            "rag",
            ("openai-agents", "retrieval"),
            19_938,
            500,
            (
                ("searched texts", "21 million passages of Wikipedia, BGE embeddings", "MuSiQue's paragraphs, BM25"),
                _GROUPS,
                ("tasks of a step", "16, in the authors' released example", "32"),
            ),
        ),
        Experiment(
            "calcx",
            "Calc-X, AutoGen: math with a calculator",
            "math",
            ("autogen",),
            20_000,
            500,
            (("training problems", "Calc-X", "20,000 of Calc-X's 319,169"), _GROUPS),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Options:
    """How all experiments of one folder are run. None leaves a number to the experiment."""

    size: Size = "full"
    cluster: str = "1x1"
    model: str = MODEL
    data: str = "data"
    store: str | None = None
    steps: int | None = None
    held_out: int | None = None
    set: tuple[str, ...] = ()

    def folder(self, name: str) -> Path:
        """The folder that an experiment's `prepare` has filled."""
        return Path(self.data) / name

    def overrides(self, seed: int) -> tuple[str, ...]:
        """The settings of one training that win over the experiment's, as KEY=VALUE."""
        steps = () if self.steps is None else (f"trainer.steps={self.steps}",)
        return (f"trainer.seed={seed}", *steps, *self.set)

    def keep(self, folder: Path) -> None:
        """Write the options into a folder; if a training began in it, compare them with those that it began with.

        Raises `ConfigError` if a result could be another one: only where data and database are may change.
        """
        file = folder / "options.json"
        if not any(path for name in EXPERIMENTS for path in folder.glob(f"{name}-*")):
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
            partial.replace(file)
            return
        was = kept_options(folder)
        for field in dataclasses.fields(self):
            before, now = getattr(was, field.name), getattr(self, field.name)
            if before != now and field.name not in ("data", "store"):
                option = field.name.replace("_", "-")
                raise ConfigError(
                    f"{folder} was begun with --{option} {_said(before)}, and now it is {_said(now)}: its results would be a "
                    f"mixture. Give the same --{option}, or another --out"
                )


def kept_options(folder: Path) -> Options:
    """The options that a folder's results are made with. Raises `ConfigError` if they cannot be read."""
    file = folder / "options.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Options(**{**values, "set": tuple(values["set"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): restore it, or give another --out") from error


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "(none)"
    return "(not given)" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class SetUp:
    """All that a trainer needs for one experiment with one seed."""

    model: str | Path
    engine: str
    algorithm: Algorithm
    train_agents: Sequence[str]
    config: Config
    agent: Agent
    train: Sequence[Task]
    val: Sequence[Task]


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names, in the paper's order; without a name all. Raises `ConfigError` for an unknown one."""
    for name in names:
        if name not in EXPERIMENTS:
            near = get_close_matches(name, EXPERIMENTS, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"give {', '.join(EXPERIMENTS)}, or none for all of them"
            raise ConfigError(f"there is no experiment {name!r}: {meant}")
    return [each for each in EXPERIMENTS.values() if not names or each.name in names]


def set_up(experiment: Experiment, options: Options, seed: int) -> SetUp:
    """Read the data and import the agent of one experiment. Raises `MissingExtraError` without the agent's framework, and
    `DataError` for data that cannot be read."""
    if options.size == "cores":
        return _at_size_of_cores(experiment, options, seed)
    folder, recipe = options.folder(experiment.name), recipe_of(experiment)
    return SetUp(
        options.model,
        CLUSTERS[options.cluster].engine,
        recipe.algorithm(),
        recipe.train_agents,
        full_size(experiment.name, options.cluster, options.overrides(seed)),
        recipe.agent(folder),
        read_tasks(folder / TRAIN),
        read_tasks(folder / VAL)[: options.held_out],
    )


def _at_size_of_cores(experiment: Experiment, options: Options, seed: int) -> SetUp:
    demo = plugins().demo(experiment.demo)()
    return SetUp(
        demo.model,
        "torch",
        demo.algorithm(),
        demo.train_agents,
        load_config(overrides=options.overrides(seed), base=with_settings(Config(), demo.settings)),
        demo.agent,
        demo.tasks(TRAIN_TASKS, seed),
        demo.val_tasks(options.held_out or HELD_OUT),
    )


def recipe_of(experiment: Experiment) -> Recipe:
    """Import an experiment's recipe, which brings the agent's framework. Raises `MissingExtraError` without it."""
    try:
        module = import_module(f"lightning_examples.paper.{experiment.name}.recipe")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lightning"):
            raise
        raise MissingExtraError(experiment.extras[0], error.name or "") from error
    return cast("Recipe", module.RECIPE)
