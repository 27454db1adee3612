"""The policy gradient of distillation: a teacher's logprobs in the place of rewards.

The invariant: the result is a sum over tokens of `weights * something`, token by token, as of any policy gradient here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.errors import EngineError
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import LossOutput, TokenBatch


@dataclass(frozen=True, slots=True)
class DistillationLoss(ClippedPolicyGradient):
    """`ClippedPolicyGradient` with the advantage A_t = log p_teacher(t) - log p(t) at each sampled token, without a gradient.

    sum_t w_t * -A_t estimates KL(p, p_teacher) at the states that the sampler reached, and grad sum_t w_t * -ratio_t * A_t
    its gradient there: E_p[(log p - log p_teacher) * grad log p]. The advantage is that of the present policy, so that the
    ratio to the sampler corrects for its age alone. Each token has its own, as with a discount of 0: what a token does to later
    ones is not counted (https://thinkingmachines.ai/blog/on-policy-distillation). The reference model is the teacher.
    """

    @property
    def needs_reference(self) -> bool:
        """The teacher's logprobs are asked for."""
        return True

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss with the metrics of `ClippedPolicyGradient` and, as a weighted sum, `teacher_kl`: log p - log p_teacher."""
        if batch.reference is None:
            raise EngineError("distillation needs the teacher's logprobs, and the engine gave none")
        apart = batch.logprobs.detach() - batch.reference
        found = super(DistillationLoss, self).__call__(replace(batch, advantages=-apart))
        return LossOutput(found.loss, {**found.metrics, "teacher_kl": float((batch.weights * apart).sum())})
