"""The clipped policy gradient against a slow, obvious one, and against what other trainers compute."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import ConfigError
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch

number = st.floats(-3, 3, allow_nan=False)
token = st.tuples(
    st.floats(-6, -0.01), st.floats(-6, -0.01), number, st.floats(0.01, 1), st.floats(0, 3), st.booleans()
)
LOSS = ClippedPolicyGradient(0.2, 0.28, 0.01)


def batch_of(tokens: list[tuple[float, float, float, float, float, bool]]) -> TokenBatch:
    logprobs, old, advantages, weights, entropy, has_old = zip(*tokens, strict=True)
    current = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    known = torch.tensor(has_old)
    return TokenBatch(
        logprobs=current,
        old_logprobs=torch.where(known, torch.tensor(old, dtype=torch.float64), current.detach()),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
        entropy=torch.tensor(entropy, dtype=torch.float64),
        has_old=known,
    )


def part(batch: TokenBatch, where: torch.Tensor) -> TokenBatch:
    values = {name: getattr(batch, name) for name in TokenBatch.__slots__}
    return TokenBatch(**{name: None if value is None else value[where] for name, value in values.items()})


@given(st.lists(token, min_size=1, max_size=8))
def test_against_a_slow_and_obvious_one(tokens: list[tuple[float, float, float, float, float, bool]]) -> None:
    expected = clipped = 0.0
    for logprob, old, advantage, weight, entropy, has_old in tokens:
        ratio = math.exp(logprob - old) if has_old else 1.0
        bounded = min(max(ratio, 1 - 0.2), 1 + 0.28)
        expected += weight * (-min(ratio * advantage, bounded * advantage) - 0.01 * entropy)
        clipped += weight * (bounded * advantage < ratio * advantage)
    output = LOSS(batch_of(tokens))
    assert output.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert output.metrics["clip_fraction"] == pytest.approx(clipped, abs=1e-12)


@given(st.lists(token, min_size=2, max_size=8), st.integers(1, 7))
def test_it_is_a_sum_over_tokens(tokens: list[tuple[float, float, float, float, float, bool]], cut: int) -> None:
    cut = min(cut, len(tokens) - 1)
    batch = batch_of(tokens)
    whole = LOSS(batch)
    first, second = LOSS(part(batch, torch.arange(cut))), LOSS(part(batch, torch.arange(cut, len(tokens))))
    assert (first.loss + second.loss).item() == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    for name, value in whole.metrics.items():
        both = first.metrics[name], second.metrics[name]
        assert value == pytest.approx(max(both) if name.endswith("_max") else sum(both), rel=1e-9, abs=1e-12)


def test_a_token_without_old_logprob_is_on_policy_with_a_gradient_and_disturbs_no_other() -> None:
    tokens = [(-1.0, -2.0, 1.0, 0.5, 0.0, True), (-1.5, math.nan, 2.0, 0.5, 0.0, False)]
    batch = batch_of(tokens)
    batch.old_logprobs[1] = math.nan
    output = ClippedPolicyGradient()(batch)
    (grad,) = torch.autograd.grad(output.loss, batch.logprobs)
    assert output.loss.item() == pytest.approx(-0.5 * 1.28 - 0.5 * 2.0)
    assert grad.tolist() == [0.0, -1.0]
    assert output.metrics["old_logprob_share"] == 0.5


@pytest.mark.parametrize(
    ("logprob", "advantage", "gradient"),
    [
        (math.log(1.27), 1.0, -1.27),  # inside the range: the ratio's own gradient
        (math.log(1.29), 1.0, 0.0),  # above, and good already
        (math.log(1.29), -1.0, 1.29),  # above, and bad: it must come down
        (math.log(0.81), -1.0, 0.81),
        (math.log(0.79), -1.0, 0.0),  # below, and bad already
        (math.log(0.79), 1.0, -0.79),
    ],
)
def test_bounds_are_asymmetric_and_one_sided(logprob: float, advantage: float, gradient: float) -> None:
    batch = batch_of([(logprob, 0.0, advantage, 1.0, 0.0, True)])
    (grad,) = torch.autograd.grad(ClippedPolicyGradient(0.2, 0.28)(batch).loss, batch.logprobs)
    assert grad.item() == pytest.approx(gradient)


@given(st.lists(token, min_size=1, max_size=8))
def test_values_of_trl_and_verl(tokens: list[tuple[float, float, float, float, float, bool]]) -> None:
    known = [(*values[:5], True) for values in tokens]
    batch = batch_of(known)
    lp, old, advantages, weights = batch.logprobs.detach(), batch.old_logprobs, batch.advantages, batch.weights
    # TRL, GRPOTrainer._compute_loss: coef_1, coef_2 = exp(log_ratio), clamp(coef_1, 1 - eps_low, 1 + eps_high)
    coef_1 = torch.exp(lp - old)
    coef_2 = torch.clamp(coef_1, 1 - 0.2, 1 + 0.28)
    trl = -torch.min(coef_1 * advantages, coef_2 * advantages)
    # verl, compute_policy_loss: maximum of the two negated surrogates, log ratio clamped to 20
    ratio = torch.exp(torch.clamp(lp - old, min=-20.0, max=20.0))
    verl = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.28))
    ours = ClippedPolicyGradient(0.2, 0.28)(batch).loss.item()
    assert ours == pytest.approx((trl * weights).sum().item(), rel=1e-9, abs=1e-12)
    assert ours == pytest.approx((verl * weights).sum().item(), rel=1e-9, abs=1e-12)


def test_on_policy_gradient_is_reinforce() -> None:
    batch = batch_of([(-1.0, -1.0, 2.0, 0.25, 0.0, True), (-0.5, -0.5, -1.0, 0.75, 0.0, True)])
    output = ClippedPolicyGradient()(batch)
    (grad,) = torch.autograd.grad(output.loss, batch.logprobs)
    assert grad.tolist() == [-0.5, 0.75]
    assert (output.metrics["ratio_max"], output.metrics["approx_kl"], output.metrics["clip_fraction"]) == (
        1.0,
        0.0,
        0.0,
    )


def test_absurd_ratios_stay_finite() -> None:
    output = ClippedPolicyGradient()(batch_of([(-0.1, -900.0, -1.0, 1.0, 0.0, True)]))
    assert math.isfinite(output.loss.item())


def test_entropy_that_is_not_asked_for_cannot_spoil_the_loss() -> None:
    batch = batch_of([(-1.0, -1.0, 1.0, 1.0, math.nan, True)])
    assert ClippedPolicyGradient()(batch).loss.item() == -1.0


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="clip_low=2"):
        ClippedPolicyGradient(clip_low=2.0)
    with pytest.raises(ConfigError, match="clip_high=-1"):
        ClippedPolicyGradient(clip_high=-1.0)
