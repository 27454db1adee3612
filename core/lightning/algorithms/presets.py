"""The presets of LightningRL: GRPO, DAPO, RLOO and the other single-call algorithms, each a row of one table.

The invariant: a preset is data: it only chooses among parts that exist by themselves. Fields of `LightningRL` override each of
them but the surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from lightning.batch.build import Advantages, Normalization, PerToken
from lightning.batch.trajectory import Trajectory, is_trained, turns
from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.protocol import GroupAdvantage, Returns

LowLevel = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"
]  # fmt: skip

Estimator = Literal["mean", "rloo", "none"]
"""The baseline of a return r in its group: `mean` r - mean · `rloo` r - mean of the others · `none` r."""

Scaling = Literal["group-std", "batch-std", "none"]
"""The divisor of advantages: `group-std` the deviation of their group's returns (GRPO; with the estimator `mean` alone) ·
`batch-std` that of all advantages of the step, after their mean is taken off · `none`."""

Ratio = Literal["token", "sequence"]
"""The importance ratio of a token: its own, or the geometric mean over its call (GSPO)."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of one low level: those fields of `LightningRL` that it decides, and the surrogate."""

    estimator: Estimator = "mean"
    scaling: Scaling = "group-std"
    surrogate: Literal["clip", "cispo"] = "clip"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalization: Normalization = "rollout-mean"
    credit: str = "identical"
    dynamic_sampling: bool = False


PRESETS: Mapping[LowLevel, Preset] = {
    # arXiv 2402.03300; weights by rollout, so that a rollout of many calls counts as much as one of few
    "grpo": Preset(),
    # arXiv 2503.20783
    "dr_grpo": Preset(scaling="none", normalization="constant"),
    # arXiv 2503.14476: clip-higher, token-level loss, dynamic sampling (overlong shaping needs a length: `overlong_tokens`)
    "dapo": Preset(clip_high=0.28, normalization="token-mean", dynamic_sampling=True),
    # arXiv 2507.18071; bounds of its section 5.1
    "gspo": Preset(ratio="sequence", clip_low=3e-4, clip_high=4e-4, normalization="sequence-mean"),
    # arXiv 2506.13585, which has no lower bound either and does not say its upper bound; here it is 1 + 4 = 5 as in
    # arXiv 2510.13786, which found 4, 5 and 8 about equally good
    "cispo": Preset(surrogate="cispo", clip_low=1.0, clip_high=4.0, normalization="token-mean"),
    # arXiv 2402.14740
    "rloo": Preset(estimator="rloo", scaling="none"),
    # arXiv 2501.03262
    "reinforce++": Preset(estimator="none", scaling="batch-std"),
    # arXiv 2501.03262, the variant with the group's mean as baseline
    "reinforce++_baseline": Preset(scaling="batch-std"),
    # arXiv 1707.06347 with arXiv 1506.02438
    "ppo": Preset(estimator="none", scaling="batch-std", credit="critic", normalization="token-mean"),
}


def estimator_of(estimator: Estimator, scaling: Scaling, eps: float) -> GroupAdvantage:
    """Return the function from a group's returns to their advantages; `eps` is added to the group's deviation."""
    functions: dict[Estimator, GroupAdvantage] = {
        "mean": partial(grpo, eps=eps) if scaling == "group-std" else centre,
        "rloo": rloo,
        "none": partial(np.asarray, dtype=np.float64),
    }
    return functions[estimator]


def unrounded(estimator: GroupAdvantage, scale: float) -> GroupAdvantage:
    """Return an estimator that gives 0 to returns which differ only by the rounding of rewards as large as `scale`. Otherwise
    `estimator` might divide this rounding by its own deviation, which would make it as large as any advantage."""

    def compare(returns: Returns) -> Returns:
        return np.zeros(len(returns)) if all_equal(returns, beside=scale) else estimator(returns)

    return compare


def whiten(
    trajectories: Sequence[Trajectory], advantages: Advantages, *, eps: float, trained_alone: bool = False
) -> list[list[PerToken]]:
    """Return (A - mean) / (std + `eps`) over the step (REINFORCE++, arXiv 2501.03262: global advantage normalisation).

    Mean and standard deviation are over the turns of all rollouts, where each rollout has the same total weight, so that a
    rollout of many calls weighs no more than one of few; tokens with advantages of their own share the weight of their turn.
    Masked rollouts (`trainer.policy_fault` = mask) are not trained, but count in mean and deviation as they do in a group's
    baseline; not with `trained_alone`, because a head gives them no advantages. Advantages that are all equal become 0.
    """
    own = [
        [np.atleast_1d(value) for value, is_turn in zip(values, turns(member), strict=True) if is_turn]
        for member, values in zip(trajectories, advantages, strict=True)
        if not trained_alone or any(map(is_trained, member.transitions, member.trainable))
    ]
    own = [values for values in own if values]
    if not own:
        return [[*values] for values in advantages]
    every = np.concatenate([value for values in own for value in values])
    if all_equal(every):
        return [[0.0] * len(values) for values in advantages]
    share = np.concatenate(
        [np.full(len(value), 1.0 / (len(own) * len(values) * max(1, len(value)))) for values in own for value in values]
    )
    mean = float(share @ every)
    deviation = float(np.sqrt(share @ np.square(every - mean)))
    return [[(value - mean) / (deviation + eps) for value in values] for values in advantages]
