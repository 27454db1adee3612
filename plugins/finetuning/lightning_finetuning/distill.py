"""The algorithm `distill`: train on the student's own rollouts with a teacher's probability of each sampled token.

The invariant: rows depend only on the finished groups and the fields below, not on rewards or the teacher. The teacher's
logprobs are computed while a step is trained, so that an audit derives the batch without the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from lightning.algorithms.intake import Intake, reason_to_skip
from lightning.algorithms.protocol import Batch
from lightning.batch import Group, Normalization, Trajectory
from lightning.config import refuses_unknown
from lightning.errors import ConfigError
from lightning.losses.correction import Correction, CorrectionKind
from lightning.losses.protocol import Loss


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Distill:
    """On-policy distillation: the student samples, and each trained token is rewarded with log p_teacher - log p_student.

    In expectation that is the gradient of the reverse KL divergence KL(student, teacher) at the states that the student
    reaches (https://thinkingmachines.ai/blog/on-policy-distillation; GKD, arXiv 2306.13649, and MiniLLM, arXiv 2306.08543).
    `lightning_finetuning.distillation_loss.DistillationLoss` has the formula.

    `teacher` is a run's step (`RUN@STEP`), or a model's folder or hub name. It must have the student's vocabulary; its size and
    architecture may differ. It takes the place of the reference model, in the engine's process.

    Rewards are recorded but not used, so that groups with equal rewards are trained on, and `group_size` may be 1.
    `normalization` is as in `LightningRL`, but not `constant`; `correction` is as there, but only of the level `token`.
    """

    teacher: str = ""
    group_size: int = 4
    normalization: Normalization = "token-mean"
    correction: Correction | CorrectionKind = "mask"

    def __post_init__(self) -> None:
        object.__setattr__(self, "teacher", str(self.teacher))
        if not self.teacher:
            raise ConfigError(
                "distillation needs a teacher: write distill:teacher=RUN@STEP, or the folder or hub name of a model"
            )
        if self.group_size < 1:
            raise ConfigError(f"group_size={self.group_size} must be positive")
        if self.normalization == "constant" or self.normalization not in get_args(Normalization):
            raise ConfigError(
                f"normalization {self.normalization!r} is not one of token-mean, rollout-mean, sequence-mean"
            )
        if not isinstance(self.correction, Correction):
            if self.correction not in get_args(CorrectionKind):
                raise ConfigError(
                    f"unknown correction {self.correction!r}: use one of {', '.join(get_args(CorrectionKind))}"
                )
            object.__setattr__(self, "correction", Correction(self.correction))
        if isinstance(self.correction, Correction) and self.correction.level != "token":
            raise ConfigError(
                f"a correction of the level {self.correction.level!r} weighs whole calls, and a teacher speaks of tokens: "
                "leave correction.level out"
            )

    @property
    def name(self) -> str:
        """The registered name from which this algorithm is made again with its fields."""
        return "distill"

    @property
    def loss(self) -> Loss:
        """The loss of distillation: a policy gradient with the teacher's advantages."""
        from lightning_finetuning.distillation_loss import DistillationLoss

        assert isinstance(self.correction, Correction)
        return DistillationLoss(correction=self.correction)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the rows of all rollouts with something to train. Their advantages are 0, because the loss computes them from
        the teacher. Raises `DataError` for a reward that no store accepts."""
        intake = Intake()
        members: list[Trajectory] = []
        for group in groups:
            whole = intake.sound(group)
            if reason := reason_to_skip(group, whole, least=1):
                intake.skip(reason)
            else:
                members.extend(whole.trajectories)
        advantages = [np.zeros(len(member.transitions)) for member in members]
        return replace(intake.batch(members, advantages, normalization=self.normalization), algorithm=self)
