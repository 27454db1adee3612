"""Training rows: what the engine computes on, whatever algorithm made them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    `prepared` (what a `StepLoss` prepared) are filled in by the engine for the losses that ask for them.
    """

    ids: IntArray
    weights: FloatArray
    advantages: FloatArray
    logprobs: FloatArray
    versions: IntArray
    spans: tuple[TokenSpan, ...]
    temperature: float = 1.0
    reference: npt.NDArray[np.floating] | None = None
    prepared: npt.NDArray[np.floating] | None = None

    def __len__(self) -> int:
        return len(self.ids)
