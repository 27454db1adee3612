"""Training rows: what the engine computes on, whatever algorithm made them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one transition's response lies inside a sample: tokens `[start, stop)` of `ids` are its action."""

    rollout: str
    attempt: int
    seq: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of T tokens, aligned so that every array has length T and index t speaks of token t.

    `weights[t]` is the token's share of the loss (0 = not trained: prompts, tool results, other agents), already
    normalised over the whole step. `advantages[t]` and `logprobs[t]` (the sampler's; NaN where it gave none) hold where
    `weights[t] != 0`; `versions[t]` is the policy version that sampled the token (-1 for tokens that were not sampled).
    `temperature` is the one the row's responses were sampled with.
    """

    ids: IntArray
    weights: FloatArray
    advantages: FloatArray
    logprobs: FloatArray
    versions: IntArray
    spans: tuple[Span, ...]
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.ids)
