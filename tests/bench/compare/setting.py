"""The one setting that both sides of the comparison run under, and the files in which they say what they did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that decides what is sampled and trained. `train[step]` are the tasks of a step, each `(input, expected)`;
    `group_size` rollouts are sampled for each. Rates and betas are AdamW's, ratios are clipped to [1 - low, 1 + high], and
    every tool takes `tool_seconds` longer than its own work."""

    model: str
    seed: int
    steps: int
    group_size: int
    lr: float
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    tool_seconds: float
    train: Sequence[Sequence[tuple[str, int]]]

    def write(self, file: Path) -> None:
        """As JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self)) + "\n")

    def described(self) -> dict[str, object]:
        """The setting without its tasks and its seed: what a report says of it."""
        values = asdict(self)
        tasks = values.pop("train")
        del values["seed"], values["model"]
        return {**values, "tasks_per_step": len(tasks[0])}


def read_setting(file: Path) -> Setting:
    """A setting as `Setting.write` wrote it."""
    values = json.loads(file.read_text())
    values["betas"] = tuple(values["betas"])
    values["train"] = [[(question, answer) for question, answer in step] for step in values["train"]]
    return Setting(**values)


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step that is done: the Unix time `at` which its weights were in `weights`, and the mean reward of the
    rollouts it was trained on."""

    step: int
    at: float
    reward: float
    weights: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one side says of its run: when its first rollout could begin (Unix time), its steps, and its versions."""

    ready: float
    steps: Sequence[Step]
    versions: Mapping[str, str]

    def write(self, file: Path) -> None:
        """As JSON, whole or not at all."""
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(file)


def read_report(file: Path) -> Report:
    """A report as `Report.write` wrote it."""
    values = json.loads(file.read_text())
    return Report(values["ready"], [Step(**step) for step in values["steps"]], values["versions"])


def versions_of(*distributions: str) -> dict[str, str]:
    """What is installed of these here, in this environment; `-` for what is not."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found
