"""The parts of a loss by themselves: what they are worth, and which gradient they have in expectation."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.losses.correction import Correction
from lightning.losses.protocol import KlEstimator
from lightning.losses.terms import (
    cispo_surrogate,
    clip_surrogate,
    importance_weight,
    reference_kl,
    sampler_kl,
)

logprob = st.floats(-9, -0.01)


def double(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@given(logprob, logprob)
def test_estimators_have_the_values_of_their_names(current: float, reference: float) -> None:
    d = current - reference
    expected = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
    for estimator in get_args(KlEstimator):
        one = reference_kl(double(current), double(reference), estimator)
        assert one.item() == pytest.approx(expected[estimator], rel=1e-9, abs=1e-12)


def expected_gradient(estimator: KlEstimator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the loss term in expectation over the policy's own tokens, and those of KL(pi || ref) and KL(ref || pi),
    all by enumeration of six actions."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    term = (log_p.detach().exp() * reference_kl(log_p, reference, estimator)).sum()
    forward = (reference.exp() * (reference - log_p)).sum()
    reverse = (log_p.exp() * (log_p - reference)).sum()
    return tuple(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (term, reverse, forward))


def test_k1_and_k2_have_the_gradient_of_the_divergence_and_k3_that_of_the_other_direction() -> None:
    for estimator in ("k1", "k2"):
        term, reverse, _ = expected_gradient(estimator)
        torch.testing.assert_close(term, reverse)
    term, reverse, forward = expected_gradient("k3")
    torch.testing.assert_close(term, forward)
    assert not torch.allclose(forward, reverse, rtol=0.1)


def test_a_token_that_the_policy_has_given_up_does_not_overflow() -> None:
    current = torch.tensor([-300.0], requires_grad=True)
    term = reference_kl(current, torch.tensor([0.0]), "k3")
    assert math.isfinite(term.item())
    assert math.isfinite(sampler_kl(torch.tensor([-300.0])).item())
    assert math.isfinite(importance_weight(torch.tensor([300.0]), Correction("tis", high=math.inf)).item())


@given(st.floats(-15, 15), st.floats(0.1, 10))
def test_importance_weights_are_ratios_below_their_cap(log_ratio: float, cap: float) -> None:
    weight = importance_weight(
        torch.tensor([log_ratio], requires_grad=True, dtype=torch.float64), Correction("tis", high=cap)
    )
    assert weight.item() == pytest.approx(min(math.exp(log_ratio), cap), rel=1e-9)
    assert not weight.requires_grad


@given(logprob, logprob, st.floats(-3, 3))
def test_cispo_against_a_slow_and_obvious_one(current: float, old: float, advantage: float) -> None:
    one = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    objective, clipped = cispo_surrogate(one, one - old, double(advantage), 0.3, 0.5)
    weight = min(max(math.exp(current - old), 0.7), 1.5)
    assert objective.item() == pytest.approx(weight * advantage * current, rel=1e-9, abs=1e-12)
    assert torch.autograd.grad(objective.sum(), one)[0].item() == pytest.approx(weight * advantage, rel=1e-9, abs=1e-12)
    assert bool(clipped) == (weight != math.exp(current - old))


def test_a_clipped_token_teaches_cispo_and_not_ppo() -> None:
    one = torch.tensor([math.log(3.0)], requires_grad=True)
    cispo, _ = cispo_surrogate(one, one, torch.ones(1), 1.0, 0.5)
    ppo, _ = clip_surrogate(one, torch.ones(1), 0.2, 0.5)
    assert torch.autograd.grad(cispo.sum(), one)[0].item() == pytest.approx(1.5)
    assert torch.autograd.grad(ppo.sum(), one)[0].item() == 0.0
