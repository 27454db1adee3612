"""GSPO, token by token and cut anywhere, against the paper's formula written down for whole sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.errors import EngineError
from lightning.losses.policy_gradient import ClippedPolicyGradient, SequencePolicyGradient
from lightning.losses.protocol import StepLoss, TokenBatch
from lightning.types import logprobs

LENGTHS = [[3, 1], [2], [5, 2, 4], [1]]
WIDE = {"clip_low": 0.1, "clip_high": 0.15}


def groups(tiny) -> list[Group]:
    return [tiny.group("a", [1.0, 0.0, 0.5, 0.0], LENGTHS), tiny.group("b", [0.0, 1.0], [[4], [2, 2]], seed=1)]


def by_the_paper(tiny, algorithm: LightningRL, given_groups: list[Group]) -> tuple[torch.Tensor, float]:
    """Equation 5: the mean over sequences of -min(s A, clip(s) A), s = (pi(y|x) / pi_old(y|x)) ^ (1 / |y|), equation 7; and
    the share of clipped sequences."""
    terms, clipped = [], 0
    for group in given_groups:
        rewards = np.array([member.reward for member in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + algorithm.advantage_eps)
        for member, advantage in zip(group.trajectories, advantages, strict=True):
            for call in member.transitions:
                likelihood = tiny.call_logprobs(call).sum()
                old = sum(call.logprobs) if len(call.logprobs) else likelihood.detach()
                s = torch.exp((likelihood - old) / len(call.response_ids))
                bounded = s.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                terms.append(-torch.minimum(s * advantage, bounded * advantage))
                clipped += bool(bounded * advantage < s * advantage)
    return torch.stack(terms).mean(), clipped / len(terms)


@pytest.mark.parametrize("bounds", [WIDE, {}])
def test_loss_and_gradient_are_the_papers(tiny, bounds: dict[str, float]) -> None:
    algorithm = LightningRL("gspo", **bounds)
    mine = tiny.step(algorithm.batch(groups(tiny)).samples, algorithm.loss)
    expected, clipped = by_the_paper(tiny, algorithm, groups(tiny))
    assert 0 < clipped < 1
    assert mine.loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(mine.gradient, tiny.gradient(expected), rtol=1e-5, atol=1e-7)
    assert mine.metrics["clip_fraction"] == pytest.approx(clipped, rel=1e-5)


def test_a_call_without_logprobs_has_the_ratio_1_and_the_others_keep_theirs(tiny) -> None:
    algorithm = LightningRL("gspo", **WIDE)
    first, second = groups(tiny)
    silent = replace(first.trajectories[2].transitions[1], logprobs=logprobs([]))
    calls = list(first.trajectories[2].transitions)
    calls[1] = silent
    members = list(first.trajectories)
    members[2] = replace(members[2], transitions=tuple(calls))
    changed = [Group("a", tuple(members)), second]
    mine = tiny.step(algorithm.batch(changed).samples, algorithm.loss)
    expected, _ = by_the_paper(tiny, algorithm, changed)
    assert mine.loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(mine.gradient, tiny.gradient(expected), rtol=1e-5, atol=1e-7)


@given(st.randoms(use_true_random=False), st.integers(1, 12), st.booleans())
@settings(max_examples=25, deadline=None)
def test_it_may_be_cut_anywhere_and_in_any_order(tiny, random, size: int, penalised: bool) -> None:
    algorithm = LightningRL("gspo", **WIDE, kl_coefficient=0.1 if penalised else 0.0, entropy_coefficient=0.01)
    samples = algorithm.batch(groups(tiny)).samples

    def cut(count: int) -> list[list[int]]:
        order = random.sample(range(count), count)
        return [order[start : start + size] for start in range(0, count, size)]

    whole = tiny.step(samples, algorithm.loss)
    pieces = tiny.step(random.sample(samples, len(samples)), algorithm.loss, cut)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-12)
    torch.testing.assert_close(pieces.gradient, whole.gradient, rtol=1e-12, atol=1e-15)
    assert pieces.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)


def test_each_token_may_have_an_advantage_of_its_own() -> None:
    """GSPO-token, equation 13: the gradient of token t is s * A_t * grad log pi_t where it is not clipped."""
    current = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    batch = TokenBatch(
        current, current.detach() - 0.05, advantages, ones, ones, ones.bool(), prepared=torch.full_like(ones, 0.05)
    )
    (gradient,) = torch.autograd.grad(SequencePolicyGradient(0.2, 0.2)(batch).loss, current)
    torch.testing.assert_close(gradient, -np.exp(0.05) * advantages)


def test_only_it_is_prepared_and_not_where_the_correction_is_decoupled() -> None:
    assert isinstance(LightningRL("gspo").loss, StepLoss)
    for algorithm in (LightningRL("grpo"), LightningRL("cispo"), LightningRL("gspo", correction="tis")):
        assert not isinstance(algorithm.loss, StepLoss)


def test_an_engine_that_does_not_prepare_is_told() -> None:
    one = torch.ones(1)
    with pytest.raises(EngineError, match="must be prepared"):
        SequencePolicyGradient()(TokenBatch(one, one, one, one, one, one.bool()))
    with pytest.raises(EngineError, match="the engine gave none"):
        ClippedPolicyGradient(kl_coefficient=0.1)(TokenBatch(one, one, one, one, one, one.bool()))
