"""Training rows: what the engine computes on, whatever algorithm made them; and the fingerprint of a trained call.

The invariant: two calls have one digest exactly when their response ids and the sampler's logprobs are bit for bit the same, so
what the engine saw and what the store holds are compared by it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import numpy.typing as npt

    from lightning.types import Transition


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Where one transition's response lies inside a sample: tokens `[start, stop)` of `ids` are its action.

    With a critic, `value_target` is what the value of its state (the prompt: the hidden state at `start - 1`) should have
    been, and `value_weight` its share of the value loss, normalised over the step and times the loss's coefficient.
    """

    rollout: str
    attempt: int
    seq: int
    start: int
    stop: int
    value_target: float = math.nan
    value_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of T tokens, aligned so that every array has length T and index t speaks of token t.

    `weights[t]` is the token's share of the loss (0 = not trained: prompts, tool results, other agents), already
    normalised over the whole step. `advantages[t]` and `logprobs[t]` (the sampler's; NaN where it gave none) hold where
    `weights[t] != 0`; `versions[t]` is the policy version that sampled the token (-1 for tokens that were not sampled).
    `temperature` is the one the row's responses were sampled with. `reference` (logprobs under the reference model) and
    `prepared` (what a `StepLoss` prepared) are filled in by the engine for the losses that ask for them, and `begun` (the
    trainer's own logprobs when the step began) where later updates need them.
    """

    ids: IntArray
    weights: FloatArray
    advantages: FloatArray
    logprobs: FloatArray
    versions: IntArray
    spans: tuple[TokenSpan, ...]
    temperature: float = 1.0
    reference: npt.NDArray[np.floating] | None = None
    begun: npt.NDArray[np.floating] | None = None
    prepared: npt.NDArray[np.floating] | None = None

    def __len__(self) -> int:
        return len(self.ids)


def sampler_logprobs(transition: Transition) -> FloatArray:
    """The sampler's logprobs as a training row holds them: one for each response token, NaN where none can be compared.

    That is the whole call when the policy server gave none, or when it sampled under a grammar or another logit mask.
    """
    if transition.constrained or not len(transition.logprobs):
        return np.full(len(transition.response_ids), np.nan, dtype=np.float32)
    return np.frombuffer(transition.logprobs, dtype=np.float32)


def span_digest(ids: Sequence[int] | npt.NDArray[np.int32], logprobs: Sequence[float] | FloatArray) -> str:
    """SHA-256 (hex) of response ids as little-endian int32, then logprobs as little-endian float32.

    Missing logprobs (an empty sequence) count as one NaN for each token, as in a training row.
    """
    tokens = np.ascontiguousarray(ids, dtype="<i4")
    values = np.ascontiguousarray(logprobs, dtype="<f4")
    if not len(values):
        values = np.full(len(tokens), np.nan, dtype="<f4")
    digest = hashlib.sha256(tokens.tobytes())
    digest.update(values.tobytes())
    return digest.hexdigest()


def transition_digest(transition: Transition) -> str:
    """The digest that the span of a recorded call must have."""
    return span_digest(transition.response_ids, sampler_logprobs(transition))
