"""How far the sampler's logprobs of the same tokens may be from the trainer's, by what both compute in.

The invariant: a bound holds for two programs that compute with the same weights, and does not for weights that are one step
old or for layers in another order; `tests/core/engines/test_real_model.py` holds that on a trained model. It holds for a few
tokens as for many: what so few may exceed it by, by chance, is allowed for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHANCE = 1e-4
"""How probable it is at most that tokens whose `share` keeps to a bound are found beyond it."""
FEW_TOKENS_SIGMAS = 3.0
"""Standard errors by which the mean of a few tokens may exceed that of many. The gaps of single tokens are spread about as
widely as their mean is large."""


@dataclass(frozen=True, slots=True)
class GapBound:
    """In nats: the mean of |trainer - sampler| is at most `mean`, and that of a `share` of the tokens at most `most`."""

    mean: float
    most: float
    share: float

    def problem_of(self, gaps: npt.NDArray[np.floating]) -> str:
        """Which part some tokens' gaps exceed, for messages; nothing where they keep to the bound. NaN never does."""
        return self._problem(float(np.mean(gaps)), quantile(gaps, self.share), len(gaps)) if len(gaps) else ""

    def problem_of_step(self, metrics: Mapping[str, float]) -> str:
        """The same of what a step reports (`StepResult`); nothing where it compared no token."""
        mean, tokens = metrics.get("mean_logprob_gap"), int(metrics.get("tokens_compared", 0))
        if mean is None or not tokens:
            return ""
        most = metrics.get("max_logprob_gap" if self.share == 1.0 else "p999_logprob_gap")
        return self._problem(mean, most, tokens)

    def _problem(self, mean: float, most: float | None, tokens: int) -> str:
        """`most` is what a `share` of so many tokens keep to (`quantile`)."""
        allowed = self.mean * of_few(tokens)
        if not mean <= allowed:
            return f"{mean:.3g} nats in the mean of {tokens} tokens, more than {allowed:.3g}"
        if most is None or most <= self.most:
            return ""
        least = allowed_outliers(tokens, self.share) + 1
        return f"{most:.3g} nats or more on {least} of {tokens} tokens, more than {self.most:g}"


FLOAT32 = GapBound(mean=1e-3, most=1e-3, share=1.0)
"""Of 1e-5 to 1e-4 that are usual for a trained model of 30 layers."""

BFLOAT16 = GapBound(mean=0.05, most=0.6, share=0.999)
"""Of 0.03 in the mean and 0.2 to 0.5 at the most, over the tokens of a step of such a model."""


def bound_for(*dtypes: str) -> GapBound:
    """The bound of the coarsest of some dtypes: the trainer's and the sampler's."""
    return FLOAT32 if {*dtypes} <= {"float32", "float64"} else BFLOAT16


def of_few(tokens: int) -> float:
    """How many times its bound the mean of so many tokens may be."""
    return 1.0 + FEW_TOKENS_SIGMAS / math.sqrt(tokens)


def quantile(gaps: npt.NDArray[np.floating], share: float) -> float | None:
    """What a `share` of all tokens keep to, at the least, as far as these (one or more) can say; NaN where one is, and None
    where they are so few that all of them may be outliers. It is the lower end of the interval that order statistics give for
    a quantile (Clopper and Pearson, Biometrika 26, 1934; David and Nagaraja, Order Statistics, 7.1): of 929 tokens the largest
    gap says nothing of 99.9 %, and the seventh does."""
    ordered = np.sort(gaps)
    if np.isnan(ordered[-1]):
        return float(ordered[-1])
    place = len(gaps) - 1 - allowed_outliers(len(gaps), share)
    return float(ordered[place]) if place >= 0 else None


@functools.lru_cache(maxsize=1024)
def allowed_outliers(tokens: int, share: float) -> int:
    """How many of so many tokens may be beyond what a `share` of all keep to: with a probability of `CHANCE` at most it are
    more, by the binomial distribution."""
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
    tail = np.cumsum(np.exp(log)[::-1])[::-1]  # of so many and more
    return first + int(np.argmax(np.append(tail[1:], 0.0) <= CHANCE))
