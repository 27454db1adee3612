"""The one setting that both sides of the comparison run under, and the files in which they say what they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from repeats import Kept


@dataclass(frozen=True, slots=True)
class Setting(Kept):
    """Everything that decides what is sampled and trained. `train[step]` are the tasks of a step, each `(input, expected)`;
    `group_size` rollouts are sampled for each. Rates and betas are AdamW's, ratios are clipped to [1 - low, 1 + high], and
    every tool takes `tool_seconds` longer than its own work. The agent, the tasks and the model are those of the demonstration
    `demo`; both sides compute in `dtype`, with float32 weights."""

    demo: str
    model: str
    dtype: str
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

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """A setting from its JSON."""
        train = [[(question, answer) for question, answer in step] for step in values["train"]]
        return cls(**{**values, "betas": tuple(values["betas"]), "train": train})

    def described(self) -> dict[str, object]:
        """The setting without its tasks and its seed: what a report says of it."""
        values = asdict(self)
        tasks = values.pop("train")
        del values["seed"], values["model"]
        return {**values, "tasks_per_step": len(tasks[0])}


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step that is done: the Unix time `at` which its weights were in `weights`, and the mean reward of the
    rollouts it was trained on."""

    step: int
    at: float
    reward: float
    weights: str


@dataclass(frozen=True, slots=True)
class Report(Kept):
    """What one side says of its run: when its first rollout could begin (Unix time), its steps, and its versions."""

    ready: float
    steps: Sequence[Step]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """A report from its JSON."""
        return cls(values["ready"], [Step(**step) for step in values["steps"]], values["versions"])


def versions_of(*distributions: str) -> dict[str, str]:
    """What is installed of these here, in this environment; `-` for what is not."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found
