"""A loss that a user gives: a whole `Loss`, or a function of one loss for each token.

The invariant: the two are told apart by what they return, so that wherever a loss can be given, either can.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.protocol import Loss, LossOutput, StepTokens, TokenBatch, needs_reference, said_by

if TYPE_CHECKING:
    from lightning.losses.policy_gradient import OwnLoss


def is_whole(loss: object) -> bool:
    """Whether something says of itself that it is a whole `Loss`. One that does not may still be."""
    try:
        return inspect.signature(loss).return_annotation in (LossOutput, "LossOutput")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not callable, or built in
        return False


def check_callable(loss: object, where: str) -> None:
    """Raises `ConfigError` for what cannot be a loss."""
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise ConfigError(
            f"{where} got {what}, which is no loss: give a function from tokens to one loss for each, or an object of a loss "
            "such as ClippedPolicyGradient(kl_coefficient=0.1)"
        )


def as_loss(given: Loss | OwnLoss, where: str) -> Loss:
    """What an engine minimises when a user gives this. Raises `ConfigError`, naming `where`, for what is no loss."""
    check_callable(given, where)
    if isinstance(given, GivenLoss) or is_whole(given):
        return given  # type: ignore[return-value]
    return PreparedGivenLoss(given) if hasattr(given, "prepare") else GivenLoss(given)


@dataclass(frozen=True, slots=True)
class GivenLoss:
    """The loss `given`; of one loss for each token, the weighted sum and the metrics of `ClippedPolicyGradient`."""

    given: Loss | OwnLoss

    @property
    def needs_reference(self) -> bool:
        """Whether `given` asks for the reference model's logprobs."""
        return needs_reference(self.given)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss and its metrics. Raises `ConfigError` for what is neither a `LossOutput` nor one loss for each token."""
        said = said_by(self.given, batch)
        if isinstance(said, LossOutput):
            return said
        from lightning.losses.policy_gradient import ClippedPolicyGradient, checked

        values = checked(said, self.given, batch)
        return ClippedPolicyGradient(surrogate=lambda tokens: values, correction=NO_CORRECTION)(batch)


@dataclass(frozen=True, slots=True)
class PreparedGivenLoss(GivenLoss):
    """A given loss that has a method `prepare`."""

    @property
    def preparer(self) -> object:
        """Whose `prepare` it is, for messages."""
        return self.given

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """What `given` says of each of the step's tokens."""
        loss: Any = self.given
        return np.asarray(loss.prepare(step))
