"""Training rows, which every algorithm gives to the engine, and the digest of a trained call.

The invariant: two calls have the same digest exactly when their response ids, the sampler's logprobs and its masks are the same
bit for bit. So the digest tells whether the engine trained on the call that the store holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning.batch.masks import SamplingMask, mask_of
from lightning.types import POLICY

if TYPE_CHECKING:
    import numpy.typing as npt

    from lightning.types import Transition


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The place of one transition's response inside a sample: the tokens `[start, stop)` of the sample's `ids`.

    With a head, `value_target` is the value that it should have given to the call's state (the prompt: the hidden state at
    `start - 1`), and `value_weight` the state's share of the value loss: normalised over the step, times the loss's
    coefficient. Without one they are NaN and 0.
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
    """One training row of T tokens: every array has length T, and index t belongs to token t.

    `weights[t]` is the token's share of the loss (0 = not trained: prompts, tool results, other agents), already
    normalised over the whole step. `advantages[t]` and `logprobs[t]` (the sampler's; NaN where it gave none) have a meaning
    only where `weights[t] != 0`. `versions[t]` is the policy version that sampled the token (-1 for tokens that were not
    sampled). All responses of the row were sampled at `temperature`, by the `policy` of this name. `mask` has the sampling
    masks of all tokens of the row; None if no token has one. With `over_all`, which a step sets for a loss that is
    `over_all_tokens`, the mask is only part of the digest. The engine fills in `reference` (logprobs under the reference
    model) and `prepared` (the numbers of a `StepLoss`) for losses that ask for them, and `begun` (the trainer's own logprobs at
    the start of the step) for a step's later updates; None means that the engine did not compute them.
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
    policy: str = POLICY
    mask: SamplingMask | None = None
    over_all: bool = False

    def __len__(self) -> int:
        return len(self.ids)


def sampler_logprobs(transition: Transition) -> FloatArray:
    """Return the sampler's logprobs as a training row holds them: float32, one for each response token.

    All are NaN if the policy server gave none, or if it sampled from other logits than the model's and the call has no
    sampling mask (`mask_of`), so that its logprobs cannot be compared with the trainer's.
    """
    return sampled_with(transition)[0]


def sampled_with(transition: Transition) -> tuple[FloatArray, SamplingMask | None]:
    """Return the sampler's logprobs (`sampler_logprobs`), and the masks under which they were sampled."""
    mask = mask_of(transition)
    if not len(transition.logprobs) or (transition.constrained and mask is None):
        return np.full(len(transition.response_ids), np.nan, dtype=np.float32), mask
    return np.asarray(transition.logprobs, dtype=np.float32), mask


def span_digest(
    ids: Sequence[int] | npt.NDArray[np.int32],
    logprobs: Sequence[float] | FloatArray,
    mask: SamplingMask | None = None,
) -> str:
    """Return the SHA-256 (hex) of response ids as little-endian int32, followed by logprobs as little-endian float32, and by
    the sampling masks, unless none is set.

    Missing logprobs (an empty sequence) count as one NaN for each token, as in a training row.
    """
    tokens = np.ascontiguousarray(ids, dtype="<i4")
    values = np.ascontiguousarray(logprobs, dtype="<f4")
    if not len(values):
        values = np.full(len(tokens), np.nan, dtype="<f4")
    digest = hashlib.sha256(tokens.tobytes())
    digest.update(values.tobytes())
    if mask is not None and mask.is_set.any():
        mask.update(digest)
    return digest.hexdigest()


def transition_digest(transition: Transition) -> str:
    """Return the digest of a recorded call, which the call's span in a training row must have too."""
    return span_digest(transition.response_ids, *sampled_with(transition))
