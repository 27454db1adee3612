"""How far the sampler's logprobs of the same tokens may be from the trainer's, by what both compute in.

The invariant: a bound holds for two programs that compute with the same weights, and does not for weights that are one step
old or for layers in another order; `tests/core/engines/test_real_model.py` holds that on a trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GapBound:
    """In nats: the mean of |trainer - sampler| is at most `mean`, and that of a `share` of the tokens at most `most`."""

    mean: float
    most: float
    share: float

    def exceeded(self, gaps: npt.NDArray[np.floating]) -> str:
        """Which part some tokens' gaps exceed, for messages; nothing where they keep to the bound. NaN never does."""
        if not len(gaps):
            return ""
        mean, most = float(np.mean(gaps)), quantile(gaps, self.share)
        if not mean <= self.mean:
            return f"{mean:.3g} nats in the mean of {len(gaps)} tokens, more than {self.mean:g}"
        if not most <= self.most:
            return f"{most:.3g} nats for {self.share:.1%} of {len(gaps)} tokens, more than {self.most:g}"
        return ""


FLOAT32 = GapBound(mean=1e-3, most=1e-3, share=1.0)
"""Of 1e-5 to 1e-4 that are usual for a trained model of 30 layers."""

BFLOAT16 = GapBound(mean=0.05, most=0.6, share=0.999)
"""Of 0.03 in the mean and 0.2 to 0.5 at the most, over the tokens of a step of such a model."""


def bound_for(*dtypes: str) -> GapBound:
    """The bound of the coarsest of some dtypes: the trainer's and the sampler's."""
    return FLOAT32 if {*dtypes} <= {"float32", "float64"} else BFLOAT16


def quantile(gaps: npt.NDArray[np.floating], share: float) -> float:
    """The smallest gap that at least a `share` of them do not exceed; NaN where one is."""
    return float(np.quantile(gaps, share, method="inverted_cdf")) if len(gaps) else 0.0
