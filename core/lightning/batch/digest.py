"""The fingerprint of one trained call: what the engine saw and what the store holds are compared by it.

The invariant: two calls have one digest exactly when their response ids and the sampler's logprobs are bit for bit the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from lightning.batch.sample import FloatArray
    from lightning.types import Transition


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
