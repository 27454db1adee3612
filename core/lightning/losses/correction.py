"""The correction that policy gradient losses apply to tokens whose probability differs between trainer and sampler: bounds on
ratios, a weight and a mask.

The invariant: with rho = p_trainer / p_sampler of a token, or of its whole call, no token weighs more than `high` allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning.config.arguments import refuses_unknown
from lightning.errors import ConfigError
from lightning.losses.protocol import StepTokens

CorrectionKind = Literal["mask", "tis", "mis", "icepop", "none"]
Level = Literal["token", "sequence", "geometric"]

BOUNDS: Mapping[CorrectionKind, tuple[float, float]] = {
    "mask": (0.5, 5.0),
    "tis": (0.0, 2.0),
    "mis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "none": (0.0, math.inf),
}
"""The default `low` and `high` of each kind. Those of `icepop` and `mask` are from Ring-1T (arXiv 2510.18855)."""

MASKED = -1e4
"""The number that marks a masked token in an array of log ratios, which must be finite; every real log ratio is larger."""


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Correction:
    """How a loss bounds the mismatch of trainer and sampler. rho is p_trainer / p_sampler of a `level`: of a `token`, of a
    whole call (`sequence`: the product over its trained tokens) or of the call's mean (`geometric`: the product's n-th root for
    n tokens, so that length does not matter). c is the weight of a token's surrogate J, without a gradient.

    `mask` (the default): J's own ratio is against the sampler, and c = 1 where `low` <= rho <= `high`, else 0.
    `none`: J's own ratio is against the sampler, and c = 1. With the other three, J's ratio is against the trainer at the
    step's start, and c corrects for the sampler (the decoupled objective of arXiv 2505.24298):
    `tis`: c = min(rho, `high`), truncated importance sampling (https://fengyao.notion.site/off-policy-rl).
    `mis`: c = rho where rho <= `high`, else 0: masked importance sampling, of tokens or of whole sequences
    (https://richardli.xyz/rl-collapse, "When Speed Kills Stability").
    `icepop`: c = rho where `low` <= rho <= `high`, else 0 (IcePop, https://ringtech.notion.site/icepop; arXiv 2510.18855).

    `dual_clip` bounds a negative advantage at a large ratio, which PPO's clip does not: J = max(PPO's J, `dual_clip` * A)
    (Ye et al., arXiv 1912.09729, with 3), so a token beyond the bound has no gradient. None means no bound. The bound acts only
    on the surrogate `clip`, since the weight of `cispo` is bounded anyway.

    `low` and `high` of None are replaced by `BOUNDS` of the kind (they stay None with `none`). A token for which the sampler
    gave no logprob has rho = 1.
    """

    kind: CorrectionKind = "mask"
    level: Level = "token"
    low: float | None = None
    high: float | None = None
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        for name, value, allowed in (("kind", self.kind, CorrectionKind), ("level", self.level, Level)):
            if value not in get_args(allowed):
                raise ConfigError(
                    f"unknown {name} {value!r} of a correction: use one of {', '.join(get_args(allowed))}"
                )
        low, high = BOUNDS[self.kind]
        for name, given, usual in (("low", self.low, low), ("high", self.high, high)):
            if given is None:
                object.__setattr__(self, name, None if self.kind == "none" else usual)
            elif self.kind == "none" or (name == "low" and given and self.kind in ("tis", "mis")):
                raise ConfigError(
                    f"{name}={given} does nothing in a correction of the kind {self.kind!r}: leave it out"
                )
        low, high = self.bounds
        if self.kind == "tis" and not high > 0.0:
            raise ConfigError(f"high={high} must be positive: importance weights are kept below it")
        if self.kind != "tis" and not 0.0 <= low < 1.0 < high:
            raise ConfigError(
                f"a correction with low={low} and high={high}: low must be 0 or more, and 1, the ratio where trainer and "
                "sampler agree, must lie between low and high"
            )
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ConfigError(
                f"dual_clip={self.dual_clip} must be greater than 1, or None for no bound: a token with a negative advantage "
                "keeps its gradient only up to this ratio"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and upper bound of rho; within them the kind neither masks nor truncates."""
        low, high = BOUNDS[self.kind]
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    @property
    def decoupled(self) -> bool:
        """Whether J's ratio is against the trainer at the step's start, and c corrects for the sampler."""
        return self.kind in ("tis", "mis", "icepop")

    @property
    def masks(self) -> bool:
        """Whether tokens with rho out of bounds are masked (rather than truncated or kept)."""
        return self.kind in ("mask", "mis", "icepop")

    def outside(self, log_rho: Any) -> Any:
        """Return where log rho, an array or a tensor, is out of bounds. NaN counts as inside, so that it is not hidden."""
        low, high = self.bounds
        return (log_rho < (math.log(low) if low else -math.inf)) | (log_rho > math.log(high))

    def log_ratios(self, step: StepTokens) -> npt.NDArray[np.float64]:
        """Return log rho at each token, shape (N,): of the token, or of its call if `level` says so."""
        difference = step.logprobs.astype(np.float64) - step.old_logprobs
        return difference if self.level == "token" else of_calls(step, difference, mean=self.level == "geometric")


NO_CORRECTION = Correction("none", dual_clip=None)
"""No bound on ratios: the correction of a user's own loss."""


def of_calls(
    step: StepTokens, numbers: npt.NDArray[np.float64], *, mean: bool, kept: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float64]:
    """Return, at each token, the sum (or with `mean` the mean) of `numbers` over the tokens of its call; all have shape (N,).
    Only `kept` tokens are added; None keeps all."""
    kept = np.ones(len(numbers), bool) if kept is None else kept
    sums = np.bincount(step.calls[kept], numbers[kept], len(step.spans))
    counts = np.maximum(np.bincount(step.calls[kept], minlength=len(step.spans)), 1) if mean else 1
    found: npt.NDArray[np.float64] = (sums / counts)[step.calls]
    return found


OF_BOTH = frozenset({"approx_kl", "ratio", "ratio_max"})
"""The metrics that compare trainer and sampler, and mean nothing without the sampler's logprobs."""


def mismatch_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means of a step's metrics with `ess` in the place of the means of rho and rho². `ess` is the effective sample
    size of the sampler's tokens for the trainer's policy, as a share of them: (E rho)² / E rho² (Kish, Survey Sampling, 1965);
    1 means that both agree. `ess`, `approx_kl` and `ratio` are rescaled to the tokens that have a sampler's logprob (their
    share is `old_logprob_share`; the given means count all others as if both agreed), and absent if no token has one."""
    found = dict(means)
    share = found.get("old_logprob_share", 1.0)
    moments = [found.pop(name, None) for name in ("rho", "rho_squared")]
    if not share:
        return {name: value for name, value in found.items() if name not in OF_BOTH}
    first, second = (None if each is None else 1.0 + (each - 1.0) / share for each in moments)
    if first is not None and second:
        found["ess"] = first * first / second
    if "approx_kl" in found:
        found["approx_kl"] /= share
    if "ratio" in found:
        found["ratio"] = 1.0 + (found["ratio"] - 1.0) / share
    return found
