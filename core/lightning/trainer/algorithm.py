"""The algorithms of a run: what cannot be one is refused at once, a dry run tries it on what was recorded, and a schedule says
which trains which step (`sft:2,grpo:20`).

The invariants: what a user wrote (an algorithm, a credit function, a loss) is called before anything is trained, not first
after the policy server's start, an evaluation and a step of rollouts; the algorithm of a step follows from its number alone, so
that a resumed run and an audit find the same.
"""

from __future__ import annotations

import inspect
import operator
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsIndex, TypeGuard

import lightning
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm, SearchAlgorithm, needs_critic
from lightning.algorithms.spec import make_algorithm, parse_algorithms
from lightning.batch.trajectory import Group
from lightning.errors import ConfigError
from lightning.losses.protocol import Loss, StepLoss, needs_reference
from lightning.plugins import plugins


@dataclass(frozen=True, slots=True)
class AlgorithmSchedule:
    """Algorithms with the step that each begins with, in order, the first with step 0. `steps` is how many all of them take;
    None where the last one goes on to `trainer.steps`."""

    phases: tuple[tuple[int, Algorithm], ...]
    steps: int | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> AlgorithmSchedule:
        """One algorithm for all steps."""
        return cls(((0, algorithm),))

    def at(self, step: int) -> Algorithm:
        """The algorithm of a step."""
        return [algorithm for first, algorithm in self.phases if first <= step][-1]

    @property
    def needs_critic(self) -> bool:
        """Whether one of them uses a critic: the engine has it from the beginning then."""
        return any(needs_critic(algorithm) for _, algorithm in self.phases)


NEEDED = ("name", "group_size", "batch", "loss")
_HERE = Path(lightning.__file__).parent


class DynamicAlgorithm(Algorithm, Protocol):
    """An algorithm that wants a step to go on sampling until enough groups teach something (DAPO, arXiv 2503.14476)."""

    dynamic_sampling: bool

    def teaches(self, group: Group) -> bool:
        """Whether a finished group would be trained on."""


def samples_dynamically(algorithm: Algorithm) -> TypeGuard[DynamicAlgorithm]:
    """Whether groups that teach nothing are to be replaced: it has `dynamic_sampling = True`."""
    return bool(getattr(algorithm, "dynamic_sampling", False))


class Tried(NamedTuple):
    """What came of trying an algorithm, in words: `problems` would end a run, `hints` would not."""

    problems: list[str]
    hints: list[str]


def resolve_algorithm(algorithm: Algorithm | SearchAlgorithm | str) -> Algorithm | SearchAlgorithm:
    """The algorithm, made where a registered name was given, alone or with arguments (`grpo:group_size=4`).

    Raises `PluginError` for an unknown name, of an algorithm or of a credit function, and `ConfigError` for arguments that it
    does not take and for what is no algorithm: a class that was not called, a function, an object without what the loop asks
    for.
    """
    made = _of_text(algorithm) if isinstance(algorithm, str) else algorithm
    if isinstance(made, type):
        raise ConfigError(f"the algorithm is the class {made.__name__}, not an object of it: give {made.__name__}(...)")
    if isinstance(made, SearchAlgorithm):
        return made
    if missing := [name for name in NEEDED if not _has(made, name)]:
        if callable(getattr(made, "tune", None)):
            raise ConfigError(
                f"{made!r:.200} has tune(), and no loop that calls it: derive its class from "
                "lightning.algorithms.prompts.PromptAlgorithm"
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
        _credit_of(made)
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
    begun, first = [], 0
    for phase in phases:
        made = resolve_algorithm(make_algorithm(phase))
        if isinstance(made, SearchAlgorithm):
            raise ConfigError(f"the algorithm {phase.name} has a loop of its own and cannot be part of a schedule")
        if phase.steps is None and phase is not phases[-1]:
            raise ConfigError(f"for how many steps does {phase.name} train? Write {phase.name}:STEPS in {algorithm!r}")
        begun.append((first, made))
        first += phase.steps or 0
    return AlgorithmSchedule(tuple(begun), first if phases[-1].steps else None)


def _is_size(given: SupportsIndex) -> bool:
    """Whether it is a number of rollouts: an integer of any kind, one of numpy too."""
    try:
        return operator.index(given) >= 1
    except TypeError:
        return False


def _has(algorithm: object, name: str) -> bool:
    """Whether it has an attribute. A property is not asked: a loss imports torch."""
    return inspect.getattr_static(algorithm, name, None) is not None or hasattr(algorithm, name)


def _credit_of(algorithm: object) -> object:
    """The credit function of a `LightningRL`; None for others."""
    if not isinstance(algorithm, LightningRL):
        return None
    credit: object = algorithm.credit
    if isinstance(credit, type):
        raise ConfigError(f"credit={credit.__name__} is a class, not a credit function: give {credit.__name__}(...)")
    return plugins().credit(credit) if isinstance(credit, str) else credit


def needs_pair(algorithm: Algorithm | SearchAlgorithm) -> bool:
    """Whether a dry run should have two rollouts of one task: a function that is not lightning's compares them."""
    return not isinstance(algorithm, SearchAlgorithm) and algorithm.group_size > 1 and _is_own(algorithm)


def try_algorithm(algorithm: Algorithm | SearchAlgorithm, groups: Sequence[Group]) -> Tried:
    """Make a batch of a dry run's groups, and call a loss that is not lightning's on two tokens, if torch is loaded anyway.

    A dry run has most tasks once: what fails only on single rollouts, where several are compared, is a hint.
    """
    recorded = [group for group in groups if group.trajectories]
    if isinstance(algorithm, SearchAlgorithm) or not recorded:
        return Tried([], [])
    if needs_critic(algorithm):
        untried = f"{_name(algorithm)} was not tried: it uses a critic's values, which come with training"
        return Tried([], [untried] if _is_own(algorithm) else [])
    compared = [group for group in recorded if algorithm.group_size == 1 or len(group.trajectories) > 1]
    batch, hints = None, []
    if compared:
        try:
            batch = algorithm.batch(compared)
        except Exception as error:  # noqa: BLE001 — a user's code: whatever it raises is what is to be reported
            return Tried([_problem(f"{_name(algorithm)} cannot make a batch of these rollouts", error)], [])
    if len(compared) < len(recorded):
        try:
            single = algorithm.batch(recorded)
        except Exception as error:  # noqa: BLE001 — as above
            hints.append(
                f"{_name(algorithm)} fails on a group of which only one rollout succeeded, and a run would end at the first: "
                f"leave such groups out ({_told(error)})"
            )
        else:
            batch = batch or single
    if batch and "torch" in sys.modules and _is_foreign(type(algorithm)):
        try:
            _call(batch.loss_for(algorithm))
        except Exception as error:  # noqa: BLE001 — as above
            return Tried([_problem(f"the loss of {_name(algorithm)} fails on two tokens", error)], hints)
    if needs_pair(algorithm) and not compared:
        hints.append(f"{_name(algorithm)} was tried on single rollouts only: no two of one task succeeded")
    return Tried([], hints)


def _call(loss: Loss) -> None:
    """Call a loss as an engine does. One that has to be prepared for the step is left alone: it sees more than tokens."""
    if isinstance(loss, StepLoss):
        return
    import torch

    from lightning.losses.protocol import TokenBatch

    logprobs, ones = torch.tensor([-1.0, -2.0], requires_grad=True), torch.ones(2)
    made = loss(
        TokenBatch(
            logprobs,
            old_logprobs=logprobs.detach().clone(),
            advantages=torch.tensor([1.0, -1.0]),
            weights=ones / 2,
            entropy=logprobs * -0.5,
            has_old=ones.bool(),
            versions=torch.zeros(2, dtype=torch.long),
            reference=logprobs.detach().clone() if needs_reference(loss) else None,
        )
    )
    if not made.loss.requires_grad:
        raise ConfigError("it has no gradient: it has to be made of tokens.logprobs, not detached")
    made.loss.backward()  # type: ignore[no-untyped-call]


def _is_own(algorithm: Algorithm) -> bool:
    """Whether what makes batches, or credit in them, is a function that is not lightning's."""
    return _is_foreign(type(algorithm)) or _is_foreign(_credit_of(algorithm))


def _is_foreign(value: object) -> bool:
    return value is not None and not str(getattr(value, "__module__", "")).startswith("lightning.")


def _name(algorithm: Algorithm) -> str:
    credit = _credit_of(algorithm)
    if not _is_foreign(credit):
        return f"the algorithm {algorithm.name}"
    return f"the algorithm {algorithm.name} with the credit function {getattr(credit, '__name__', repr(credit))}"


def _problem(what: str, error: Exception) -> str:
    return f"{what}, and a run would end at its first step: {_told(error)}"


def _told(error: Exception) -> str:
    """In words, with the user's own line: the last of the file that lightning called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _HERE not in Path(frame.filename).parents]
    where = ""
    if frames:
        last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        where = f" ({last.filename}:{last.lineno}, in {last.name}: {last.line})"
    return f"{type(error).__name__}: {error}{where}"
