"""The presets of LightningRL: GRPO, DAPO, RLOO and the other single-call algorithms, each a row of one table.

The invariant: a preset only chooses among parts that exist by themselves (an estimator, a surrogate, a normalisation). Fields
of `LightningRL` can override the preset's credit, clipping, normalisation and dynamic sampling, and nothing else of it.
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
"""The advantage of a return r in its group: `grpo` (r - mean) / std · `centre` r - mean · `rloo` r - mean of the others ·
`none` r."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of one low level. With `ratio` "sequence" the importance ratio is that of a whole call. With `whiten` the
    advantages are normalised over the whole step. `equal_teaches` says whether rollouts teach something even if the returns of
    their group are equal, or the group has one rollout only."""

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
    # arXiv 2506.13585, which has no lower bound either and does not say its upper bound; here it is 1 + 4 = 5 as in
    # arXiv 2510.13786, which found 4, 5 and 8 about equally good
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
    """Return a preset's function from a group's returns to their advantages; `eps` is added to GRPO's deviation."""
    functions: dict[Estimator, GroupAdvantage] = {
        "grpo": partial(grpo, eps=eps), "centre": centre, "rloo": rloo, "none": partial(np.asarray, dtype=np.float64),
    }  # fmt: skip
    return functions[preset.estimator]


def unrounded(estimator: GroupAdvantage, scale: float) -> GroupAdvantage:
    """Return an estimator that gives 0 to returns which differ only by the rounding of rewards as large as `scale`. Otherwise
    `estimator` might divide this rounding by its own deviation, which would make it as large as any advantage."""

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
    """Return (A - mean) / (std + `eps`) over the step (REINFORCE++, arXiv 2501.03262: global advantage normalisation).

    Mean and standard deviation are over the turns of all rollouts, where each rollout has the same total weight, so that a
    rollout of many calls weighs no more than one of few. Masked rollouts (`trainer.policy_fault` = mask) are not trained, but
    count in mean and deviation as they do in a group's baseline; not with `trained_alone`, because a head gives them no
    advantages. Advantages that are all equal become 0.
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
