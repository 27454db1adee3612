"""Bounds on the difference between the trainer's and the sampler's logprobs of the same tokens, by the dtypes of both.

The invariant: two programs that compute with the same weights keep to the bound; weights that are one step old, or layers in
another order, exceed it; `tests/core/engines/test_real_model.py` checks that on a trained model. The bound is as strict for few
tokens as for many: an allowance is made for chance among few tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHANCE = 1e-4
"""The highest probability of finding a fault where there is none, because by chance too many tokens exceed the bound."""
FEW_TOKENS_SIGMAS = 3.0
"""The number of standard errors by which the mean gap of a few tokens may exceed the bound. The standard deviation of the gaps
of single tokens is about as large as their mean."""


@dataclass(frozen=True, slots=True)
class GapBound:
    """A bound on the gaps |trainer - sampler|, in nats: their mean is at most `mean`, and a `share` of the tokens has a gap of
    at most `most`."""

    mean: float
    most: float
    share: float

    def problem_of(self, gaps: npt.NDArray[np.floating]) -> str:
        """Return, for messages, how the gaps of some tokens exceed the bound; "" if they keep to it. NaN exceeds every
        bound."""
        return self._problem(float(np.mean(gaps)), quantile(gaps, self.share), len(gaps)) if len(gaps) else ""

    def problem_of_step(self, metrics: Mapping[str, float]) -> str:
        """Return, for messages, how the gaps in a step's metrics (`StepResult`) exceed the bound; "" if they keep to it or the
        step compared no token."""
        mean, tokens = metrics.get("mean_logprob_gap"), int(metrics.get("tokens_compared", 0))
        if mean is None or not tokens:
            return ""
        most = metrics.get("max_logprob_gap" if self.share == 1.0 else "p999_logprob_gap")
        return self._problem(mean, most, tokens)

    def _problem(self, mean: float, most: float | None, tokens: int) -> str:
        """Return how a mean gap and a `most`, the `quantile` of `share`, of so many tokens exceed the bound; "" if they do
        not."""
        allowed = self.mean * of_few(tokens)
        if not mean <= allowed:
            return f"{mean:.3g} nats in the mean of {tokens} tokens, more than {allowed:.3g}"
        if most is None or most <= self.most:
            return ""
        least = allowed_outliers(tokens, self.share) + 1
        return f"{most:.3g} nats or more on {least} of {tokens} tokens, more than {self.most:g}"


FLOAT32 = GapBound(mean=1e-3, most=1e-3, share=1.0)
"""The bound if both compute in float32. Usual gaps of a trained model of 30 layers are 1e-5 to 1e-4."""

BFLOAT16 = GapBound(mean=0.05, most=0.6, share=0.999)
"""The bound if one computes in bfloat16. In a step of such a model the mean gap is 0.03, and the largest is 0.2 to 0.5."""


def bound_for(*dtypes: str) -> GapBound:
    """Return the bound for the coarsest of some dtypes, such as the trainer's and the sampler's."""
    return FLOAT32 if {*dtypes} <= {"float32", "float64"} else BFLOAT16


def of_few(tokens: int) -> float:
    """Return the factor by which the mean gap of so many tokens may exceed its bound: 1 or more."""
    return 1.0 + FEW_TOKENS_SIGMAS / math.sqrt(tokens)


def quantile(gaps: npt.NDArray[np.floating], share: float) -> float | None:
    """Return a lower bound, from the gaps of some tokens (one or more), of the gap that a `share` of all tokens do not exceed;
    NaN if a gap is NaN, and None if the tokens are so few that all may be outliers. It is the lower end of the interval that
    order statistics give for a quantile (Clopper and Pearson, Biometrika 26, 1934; David and Nagaraja, Order Statistics, 7.1):
    for 99.9 % and 929 tokens it is the seventh largest gap, since six may be outliers."""
    ordered = np.sort(gaps)
    if np.isnan(ordered[-1]):
        return float(ordered[-1])
    place = len(gaps) - 1 - allowed_outliers(len(gaps), share)
    return float(ordered[place]) if place >= 0 else None


@functools.lru_cache(maxsize=1024)
def allowed_outliers(tokens: int, share: float) -> int:
    """Return how many of `tokens` tokens may exceed a number that a `share` of all tokens do not exceed: by the binomial
    distribution, more of them do so with a probability of at most `CHANCE`."""
    rare = 1.0 - share
    if rare <= 0.0:
        return 0
    first = math.floor(tokens * rare)
    counts = range(first, min(tokens, first + 60 + math.ceil(20 * math.sqrt(tokens * rare))) + 1)
    log = [
        math.lgamma(tokens + 1) - math.lgamma(k + 1) - math.lgamma(tokens - k + 1)
        + k * math.log(rare) + (tokens - k) * math.log(share)
        for k in counts
    ]  # fmt: skip
    tail = np.cumsum(np.exp(log)[::-1])[::-1]  # probability of k or more
    return first + int(np.argmax(np.append(tail[1:], 0.0) <= CHANCE))
