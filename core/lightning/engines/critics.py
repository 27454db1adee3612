"""What every engine refuses about critics, in the same words.

The invariant: no state's value is asked of, learned by, or restored into an engine that has no critic of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lightning.batch.sample import Sample
from lightning.errors import EngineError

Trunk = Literal["shared", "frozen"]
"""Whether the critic's loss trains the model under it too, or its own layer only."""


def no_critic() -> EngineError:
    """For values that are asked of an engine without one."""
    return EngineError(
        "the engine has no critic: open it with critic=True, as the trainer does for an algorithm with `critic = True`"
    )


def refuse_targets(samples: Sequence[Sample]) -> None:
    """For an engine without a critic: raises `EngineError` when rows say what states should have been worth."""
    if any(span.value_weight for sample in samples for span in sample.spans):
        raise EngineError(
            "the rows say what states should have been worth, but the engine has no critic to learn it: open it with "
            "critic=True, or give the algorithm the attribute `critic = True`"
        )


def same_critic(folder: Path, saved: str, opened: str) -> None:
    """Raises `EngineError` when a training state was saved with another kind of critic than the engine was opened with.
    Kinds are those of `Trunk`; an empty one is no critic."""
    if saved != opened:
        raise EngineError(
            f"the training state in {folder} was saved {_with(saved)}, but this engine was opened {_with(opened)}: "
            "resume with the algorithm and the engine.critic_trunk that the run was started with"
        )


def _with(critic: str) -> str:
    return f"with a critic on a {critic} trunk" if critic else "without a critic"
