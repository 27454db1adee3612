"""The algorithms of a run: what cannot be one is refused at once, and a schedule says which trains which step
(`sft:2,grpo:20`).

The invariant: the algorithm of a step follows from its number alone, so that a resumed run and an audit find the same.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, TypeGuard

from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm, SearchAlgorithm, head_of
from lightning.algorithms.spec import make_algorithm, parse_algorithms
from lightning.batch.trajectory import Group
from lightning.config.arguments import refuse_class
from lightning.errors import ConfigError
from lightning.plugins import plugins


@dataclass(frozen=True, slots=True)
class AlgorithmSchedule:
    """Algorithms with the step that each begins with, in order, the first with step 1. `steps` is how many all of them take;
    None where the last one goes on to `trainer.steps`."""

    phases: tuple[tuple[int, Algorithm], ...]
    steps: int | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> AlgorithmSchedule:
        """One algorithm for all steps."""
        return cls(((1, algorithm),))

    def at(self, step: int) -> Algorithm:
        """The algorithm of a step."""
        return [algorithm for first, algorithm in self.phases if first <= step][-1]

    @property
    def head(self) -> str:
        """The head that one of them uses, which the engine has from the beginning then; "" without one. Raises `ConfigError`
        where they use several."""
        heads = sorted({head_of(algorithm) for _, algorithm in self.phases} - {""})
        if len(heads) > 1:
            raise ConfigError(f"an engine has one head, but the algorithms of this run use several: {', '.join(heads)}")
        return "".join(heads)


NEEDED = ("name", "group_size", "batch", "loss")


class DynamicAlgorithm(Algorithm, Protocol):
    """An algorithm that wants a step to go on sampling until enough groups teach something (DAPO, arXiv 2503.14476)."""

    dynamic_sampling: bool

    def teaches(self, group: Group) -> bool:
        """Whether a finished group would be trained on."""


def samples_dynamically(algorithm: Algorithm) -> TypeGuard[DynamicAlgorithm]:
    """Whether groups that teach nothing are to be replaced: it has `dynamic_sampling = True`."""
    return bool(getattr(algorithm, "dynamic_sampling", False))


def resolve_algorithm(algorithm: Algorithm | SearchAlgorithm | str) -> Algorithm | SearchAlgorithm:
    """The algorithm, made where a registered name was given, alone or with arguments (`grpo:group_size=4`).

    Raises `PluginError` for an unknown name, of an algorithm or of a credit function, and `ConfigError` for arguments that it
    does not take and for what is no algorithm: a class that was not called, a function, an object without what the loop asks
    for.
    """
    made = _of_text(algorithm) if isinstance(algorithm, str) else algorithm
    refuse_class(made, "the algorithm")
    if isinstance(made, SearchAlgorithm):
        return made
    if missing := [name for name in NEEDED if not _has(made, name)]:
        if callable(getattr(made, "tune", None)):
            raise ConfigError(
                f"{made!r:.200} has tune(), and no loop that calls it: derive its class from "
                "lightning_prompts.PromptAlgorithm"
            )
        cure = "give a registered name, lightning.LightningRL(...), or an object with name, group_size, batch and loss"
        if inspect.isroutine(made):
            cure = "lightning.algorithms.from_batch and from_loss make an algorithm of a function"
        raise ConfigError(f"{made!r:.200} is no algorithm: it has no {', no '.join(missing)}; {cure}")
    if not _is_size(made.group_size):
        raise ConfigError(f"the algorithm {made.name} has group_size={made.group_size!r}: rollouts per task, 1 or more")
    if samples_dynamically(made) and not callable(getattr(made, "teaches", None)):
        raise ConfigError(
            f"the algorithm {made.name} has dynamic_sampling=True, which samples until enough groups teach something, and no "
            "method teaches(group) that says which do: add it, or call the argument otherwise"
        )
    if isinstance(made, LightningRL):
        credit_of(made)
    return made


def _of_text(text: str) -> Algorithm | SearchAlgorithm:
    first, *rest = parse_algorithms(text)
    if rest or first.steps is not None:
        raise ConfigError(
            f"the algorithm {text!r} is a schedule, where one algorithm is asked for: give {first.name!r}"
        )
    return make_algorithm(first)


def resolve_schedule(algorithm: Algorithm | SearchAlgorithm | str) -> AlgorithmSchedule | SearchAlgorithm:
    """The algorithm or the schedule that was given. Raises what `resolve_algorithm` does, and `ConfigError` for a schedule of
    which it cannot be told when a phase ends, or with a search for prompts in it."""
    phases = parse_algorithms(algorithm) if isinstance(algorithm, str) else []
    if len(phases) < 2 and not any(phase.steps for phase in phases):
        made = resolve_algorithm(algorithm)
        return made if isinstance(made, SearchAlgorithm) else AlgorithmSchedule.of(made)
    begun, first = [], 1
    for phase in phases:
        made = resolve_algorithm(make_algorithm(phase))
        if isinstance(made, SearchAlgorithm):
            raise ConfigError(f"the algorithm {phase.name} has a loop of its own and cannot be part of a schedule")
        if phase.steps is None and phase is not phases[-1]:
            raise ConfigError(f"for how many steps does {phase.name} train? Write {phase.name}:STEPS in {algorithm!r}")
        begun.append((first, made))
        first += phase.steps or 0
    return AlgorithmSchedule(tuple(begun), first - 1 if phases[-1].steps else None)


def _is_size(given: SupportsIndex) -> bool:
    """Whether it is a number of rollouts: an integer of any kind, one of numpy too."""
    try:
        return operator.index(given) >= 1
    except TypeError:
        return False


def _has(algorithm: object, name: str) -> bool:
    """Whether it has an attribute. A property is not asked: a loss imports torch."""
    return inspect.getattr_static(algorithm, name, None) is not None or hasattr(algorithm, name)


def credit_of(algorithm: object) -> object:
    """The credit function of a `LightningRL`; None for others."""
    if not isinstance(algorithm, LightningRL):
        return None
    return plugins().credit(algorithm.credit)
