"""The presets of LightningRL: GRPO, DAPO, RLOO and the other single-call algorithms, each a row of one table.

The invariant: a preset only chooses among parts that exist by themselves (an estimator, a surrogate, a normalisation). The
fields of `LightningRL` change its credit, its clipping, its normalisation and its sampling; the rest is the preset's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning.batch.build import Normalization
from lightning.batch.trajectory import Trajectory, is_trained, turns
from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.protocol import GroupAdvantage, Returns

LowLevel = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"
]  # fmt: skip

Estimator = Literal["grpo", "centre", "rloo", "none"]
"""How a rollout's return is compared within its group: (r - mean) / std, r - mean, r - mean of the others, or not at all."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One low level. With `ratio` "sequence" the importance ratio is that of a whole call. `whiten`ed advantages are
    normalised over the whole step. `equal_teaches` says whether a rollout teaches something where the returns of its group
    do not differ, also when it is alone."""

    estimator: Estimator = "grpo"
    surrogate: Literal["clip", "cispo"] = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalization: Normalization = "rollout-mean"
    credit: str = "identical"
    whiten: bool = False
    equal_teaches: bool = False
    dynamic_sampling: bool = False


PRESETS: Mapping[LowLevel, Preset] = {
    # arXiv 2402.03300; weights by rollout, so that a rollout of many calls counts as much as one of few
    "grpo": Preset(),
    # arXiv 2503.20783
    "dr_grpo": Preset(estimator="centre", normalization="constant"),
    # arXiv 2503.14476: clip-higher, token-level loss, dynamic sampling (overlong shaping needs a length: `overlong_tokens`)
    "dapo": Preset(clip_high=0.28, normalization="token-mean", dynamic_sampling=True),
    # arXiv 2507.18071; bounds of its section 5.1
    "gspo": Preset(ratio="sequence", clip_low=3e-4, clip_high=4e-4, normalization="sequence-mean"),
    # arXiv 2506.13585, without a lower bound as there; the upper one, which it leaves open, is 1 + 4 = 5 as in
    # arXiv 2510.13786, which found 4, 5 and 8 about as good
    "cispo": Preset(surrogate="cispo", clip_low=1.0, clip_high=4.0, normalization="token-mean"),
    # arXiv 2402.14740
    "rloo": Preset(estimator="rloo"),
    # arXiv 2501.03262
    "reinforce++": Preset(estimator="none", whiten=True, equal_teaches=True),
    # arXiv 2501.03262, the variant with the group's mean as baseline
    "reinforce++_baseline": Preset(estimator="centre", whiten=True),
    # arXiv 1707.06347 with arXiv 1506.02438
    "ppo": Preset(estimator="none", credit="critic", normalization="token-mean", whiten=True, equal_teaches=True),
}


def estimator_of(preset: Preset, eps: float) -> GroupAdvantage:
    """The function from a group's returns to their advantages; `eps` is added to GRPO's deviation."""
    functions: dict[Estimator, GroupAdvantage] = {
        "grpo": partial(grpo, eps=eps), "centre": centre, "rloo": rloo, "none": partial(np.asarray, dtype=np.float64),
    }  # fmt: skip
    return functions[preset.estimator]


def unrounded(estimator: GroupAdvantage, scale: float) -> GroupAdvantage:
    """The estimator, for returns made of rewards as large as `scale`: what differs by rounding only gets 0. Divided by its own
    deviation, rounding would be as large as any advantage."""

    def compare(returns: Returns) -> Returns:
        return np.zeros(len(returns)) if all_equal(returns, beside=scale) else estimator(returns)

    return compare


def whiten(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[npt.NDArray[np.float64]],
    *,
    eps: float,
    trained_alone: bool = False,
) -> list[npt.NDArray[np.float64]]:
    """(A - mean) / (std + `eps`) over the step (REINFORCE++, arXiv 2501.03262: global advantage normalisation).

    Mean and standard deviation are those over rollouts of the mean over a rollout's turns, so that a rollout of many calls
    weighs no more than one of few; with one advantage for all calls of a rollout they are those of the rollouts. Rollouts that
    are compared and not trained (`trainer.policy_fault` = mask) count as they do in a group's baseline, unless `trained_alone`:
    a critic has said nothing of them. Advantages that do not differ become 0.
    """
    own = [
        values[turns(member)]
        for member, values in zip(trajectories, advantages, strict=True)
        if not trained_alone or any(map(is_trained, member.transitions, member.trainable))
    ]
    own = [values for values in own if len(values)]
    if not own:
        return list(advantages)
    every = np.concatenate(own)
    if all_equal(every):
        return [np.zeros(len(values)) for values in advantages]
    share = np.concatenate([np.full(len(values), 1.0 / (len(own) * len(values))) for values in own])
    mean = float(share @ every)
    deviation = float(np.sqrt(share @ np.square(every - mean)))
    return [(np.asarray(values, dtype=np.float64) - mean) / (deviation + eps) for values in advantages]
