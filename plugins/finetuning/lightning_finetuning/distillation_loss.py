"""The loss of distillation: a policy gradient whose advantages come from a teacher's logprobs instead of rewards.

The invariant: the loss is a sum over tokens of `weights` times a term of that token, like every policy gradient here.
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
    its gradient there: E_p[(log p - log p_teacher) * grad log p]. The advantage uses the present policy, so that the ratio only
    corrects for the age of the sampler. Each token has an advantage of its own, as with a discount of 0: its effect on later
    tokens does not count (https://thinkingmachines.ai/blog/on-policy-distillation). The reference model is the teacher.
    """

    @property
    def needs_reference(self) -> bool:
        """True: the loss needs the teacher's logprobs as those of the reference model."""
        return True

    @property
    def over_all_tokens(self) -> bool:
        """True: the teacher's whole distribution is learned, also where a grammar left few tokens."""
        return True

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss, the metrics of `ClippedPolicyGradient`, and `teacher_kl`, the weighted sum of log p - log p_teacher.
        Raises `EngineError` without the teacher's logprobs."""
        if batch.reference is None:
            raise EngineError("distillation needs the teacher's logprobs, and the engine gave none")
        apart = batch.logprobs.detach() - batch.reference
        found = super(DistillationLoss, self).__call__(replace(batch, advantages=-apart))
        return LossOutput(found.loss, {**found.metrics, "teacher_kl": float((batch.weights * apart).sum())})
