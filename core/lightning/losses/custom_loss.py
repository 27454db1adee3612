"""A user's own loss: a whole `Loss`, or a function that returns one loss for each token.

The invariant: every place that takes a loss takes either form, because they are told apart by what they return.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.protocol import (
    Loss,
    LossOutput,
    StepTokens,
    TokenBatch,
    name_of,
    needs_reference,
    needs_top_logprobs,
    over_all_tokens,
    said_by,
)

if TYPE_CHECKING:
    from lightning.losses.policy_gradient import OwnLoss


def is_whole(loss: object) -> bool:
    """Whether a function is annotated to return a `LossOutput`, so that it is a whole `Loss`. False does not rule that out."""
    try:
        return inspect.signature(loss).return_annotation in (LossOutput, "LossOutput")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not callable, or built in
        return False


def check_callable(loss: object, where: str) -> None:
    """Raise `ConfigError`, naming `where`, for a class and for an object that cannot be called, and for a loss with a
    `needs_top_logprobs` that is no number of tokens."""
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise ConfigError(
            f"{where} got {what}, which is no loss: give a function from tokens to one loss for each, or an object of a loss "
            "such as ClippedPolicyGradient(kl_coefficient=0.1)"
        )
    needs_top_logprobs(loss)


def as_loss(given: Loss | OwnLoss, where: str) -> Loss:
    """Return a user's loss, of either form, as a `Loss`. Raises `ConfigError`, naming `where`, if it cannot be a loss."""
    check_callable(given, where)
    if isinstance(given, GivenLoss) or is_whole(given):
        return given  # type: ignore[return-value]
    return PreparedGivenLoss(given) if hasattr(given, "prepare") else GivenLoss(given)


@dataclass(frozen=True, slots=True)
class GivenLoss:
    """A user's loss `given`. If it returns one loss for each token, these are added up by weight, with the metrics of
    `ClippedPolicyGradient` and its own."""

    given: Loss | OwnLoss

    @property
    def needs_reference(self) -> bool:
        """Whether `given` asks for the reference model's logprobs."""
        return needs_reference(self.given)

    @property
    def needs_top_logprobs(self) -> int | None:
        """The number of most probable tokens whose logprobs `given` wants; None for none."""
        return needs_top_logprobs(self.given) or None

    @property
    def over_all_tokens(self) -> bool:
        """Whether `given` is over all tokens, also where a mask was sampled under."""
        return over_all_tokens(self.given)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss and its metrics. Raises `ConfigError` if `given` returns neither a `LossOutput` nor one loss for each
        token."""
        said = said_by(self.given, batch)
        if isinstance(said, LossOutput):
            return said
        from lightning.losses.policy_gradient import ClippedPolicyGradient, checked

        checked(said, self.given, batch)

        def told(tokens: TokenBatch) -> Any:
            return said

        told.__name__ = name_of(self.given)
        return ClippedPolicyGradient(surrogate=told, correction=NO_CORRECTION)(batch)


@dataclass(frozen=True, slots=True)
class PreparedGivenLoss(GivenLoss):
    """A user's loss that has a method `prepare`."""

    @property
    def preparer(self) -> object:
        """The object whose `prepare` is called, for messages."""
        return self.given

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """Return the numbers that `given.prepare` gives for the step's tokens, shape (N,)."""
        loss: Any = self.given
        return np.asarray(loss.prepare(step))
