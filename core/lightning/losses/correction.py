"""What policy gradient losses do about tokens on which the trainer and the sampler disagree: one correction, composed of a
bound on ratios, a weight and a mask.

The invariant: with rho = p_trainer / p_sampler of a token, or of its whole call, no token weighs more than `high` allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

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
"""`low` and `high` of each kind. IcePop's are those of Ring-1T (arXiv 2510.18855), which the default shares."""

MASKED = -1e4
"""What stands for the log ratio of a masked token where only one finite number can be said of it; no log ratio is as small."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How the mismatch of trainer and sampler is bounded. rho is p_trainer / p_sampler of a `level`: a `token`, a whole call
    (`sequence`: the product over its trained tokens) or the call's mean (`geometric`: its root, so that long calls are not
    judged by their length). c is the weight of a token, without a gradient.

    `mask` (the default): the surrogate's own ratio is against the sampler, and c = 1 where `low` <= rho <= `high`, else 0.
    `none`: c = 1. With the other three J's ratio is against the trainer at the step's start, and c corrects for the sampler
    (the decoupled objective of arXiv 2505.24298):
    `tis`: c = min(rho, `high`), truncated importance sampling (https://fengyao.notion.site/off-policy-rl).
    `mis`: c = rho where rho <= `high`, else 0: masked importance sampling, of tokens or of whole sequences
    (https://richardli.xyz/rl-collapse, "When Speed Kills Stability").
    `icepop`: c = rho where `low` <= rho <= `high`, else 0 (IcePop, https://ringtech.notion.site/icepop; arXiv 2510.18855).

    `dual_clip` bounds what PPO's clip leaves open, a negative advantage at a large ratio: J = max(PPO's J, `dual_clip` * A)
    (Ye et al., arXiv 1912.09729, which has 3), so such a token has no gradient. None leaves it open. It is for the
    surrogate `clip`; a `cispo` weight is bounded by itself.

    `low` and `high` are `BOUNDS` of the kind where they are None; the object then holds these. A token whose sampler gave no
    logprob has rho = 1.
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
                f"a correction with low={low} and high={high}: 1, where both agree, must lie between them"
            )
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ConfigError(f"dual_clip={self.dual_clip} must be greater than 1: ratios up to it keep their gradient")

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which rho is taken as it is."""
        low, high = BOUNDS[self.kind]
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    @property
    def decoupled(self) -> bool:
        """Whether J's ratio is against the trainer at the step's start, and c corrects for the sampler."""
        return self.kind in ("tis", "mis", "icepop")

    @property
    def masks(self) -> bool:
        """Whether what is out of bounds is masked."""
        return self.kind in ("mask", "mis", "icepop")

    def outside(self, log_rho: Any) -> Any:
        """Where log rho, an array or a tensor, is out of bounds; what is no number is inside, so that it is not hidden."""
        low, high = self.bounds
        return (log_rho < (math.log(low) if low else -math.inf)) | (log_rho > math.log(high))

    def log_ratios(self, step: StepTokens) -> npt.NDArray[np.float64]:
        """log rho of each token's level, shape (N,)."""
        difference = step.logprobs.astype(np.float64) - step.old_logprobs
        return difference if self.level == "token" else of_calls(step, difference, mean=self.level == "geometric")


NO_CORRECTION = Correction("none", dual_clip=None)
"""Ratios as they are: of losses of one's own."""


def of_calls(
    step: StepTokens, numbers: npt.NDArray[np.float64], *, mean: bool, kept: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float64]:
    """The sum or mean of some numbers (N,) over each token's call, of the `kept` ones only, at each of its tokens, (N,)."""
    kept = np.ones(len(numbers), bool) if kept is None else kept
    sums = np.bincount(step.calls[kept], numbers[kept], len(step.spans))
    counts = np.maximum(np.bincount(step.calls[kept], minlength=len(step.spans)), 1) if mean else 1
    found: npt.NDArray[np.float64] = (sums / counts)[step.calls]
    return found
