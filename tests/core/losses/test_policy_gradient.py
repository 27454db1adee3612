"""The clipped policy gradient against a slow, obvious one, and against what other trainers compute."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch

number = st.floats(-3, 3, allow_nan=False)
token = st.tuples(
    st.floats(-6, -0.01), st.floats(-6, -0.01), number, st.floats(0.01, 1), st.floats(0, 3), st.booleans()
)
LOSS = ClippedPolicyGradient(0.2, 0.28, 0.01, correction=NO_CORRECTION)
EVERYTHING = {"entropy_coefficient": 0.01, "kl_coefficient": 0.3}


def tis(cap: float | None) -> Correction:
    return NO_CORRECTION if cap is None else Correction("tis", high=cap)


def own(tokens: TokenBatch) -> torch.Tensor:
    """Plain importance-weighted REINFORCE, as a user may write it."""
    return -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages


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
        reference=torch.tensor(entropy, dtype=torch.float64) - 4.0,
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


@given(
    st.lists(token, min_size=2, max_size=8),
    st.sampled_from(["clip", "cispo", own]),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([None, 0.5, 2.0]),
)
def test_every_composition_against_a_slow_and_obvious_one(tokens, surrogate, estimator, cap) -> None:
    """Value and gradient, token by token, in plain Python."""
    loss = ClippedPolicyGradient(
        0.2, 0.28, surrogate=surrogate, kl_estimator=estimator, correction=tis(cap), **EVERYTHING
    )
    batch = batch_of(tokens)
    value, gradient = 0.0, []
    for logprob, old, advantage, weight, entropy, has_old in tokens:
        sampled = math.exp(logprob - old) if has_old else 1.0
        ratio, correction = (sampled, 1.0) if cap is None else (1.0, min(sampled, cap))
        bounded = min(max(ratio, 0.8), 1.28)
        if surrogate == "clip":
            objective = min(ratio * advantage, bounded * advantage)
            slope = ratio * advantage if ratio * advantage <= bounded * advantage else 0.0
        elif surrogate == "cispo":
            objective, slope = bounded * advantage * logprob, bounded * advantage
        else:
            objective = slope = ratio * advantage
        d = logprob - (entropy - 4.0)
        penalty = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        penalty_slope = 1 - math.exp(-d) if estimator == "k3" else d
        value += weight * (-correction * objective + 0.3 * penalty - 0.01 * entropy)
        gradient.append(weight * (-correction * slope + 0.3 * penalty_slope))
    output = loss(batch)
    assert output.loss.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    (found,) = torch.autograd.grad(output.loss, batch.logprobs)
    assert found.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-12)


@given(st.lists(token, min_size=1, max_size=8), st.floats(0.2, 3))
def test_what_a_truncated_correction_reports(tokens, cap: float) -> None:
    output = ClippedPolicyGradient(correction=tis(cap), kl_coefficient=0.1, kl_estimator="k3")(batch_of(tokens))
    weights = [values[3] for values in tokens]
    sampled = [math.exp(lp - old) if has_old else 1.0 for lp, old, _, _, _, has_old in tokens]
    mean = sum(weight * min(ratio, cap) for weight, ratio in zip(weights, sampled, strict=True))
    assert output.metrics["correction_weight"] == pytest.approx(mean)
    over = sum(weight * (ratio > cap) for weight, ratio in zip(weights, sampled, strict=True))
    assert output.metrics["truncated_share"] == pytest.approx(over)
    largest = float(any(has_old for *_, has_old in tokens))  # of the tokens that are compared, if any
    assert (output.metrics["clip_fraction"], output.metrics["ratio_max"]) == (0.0, largest)
    assert output.metrics["approx_kl"] >= 0.0
    differences = [lp - entropy + 4.0 for lp, _, _, _, entropy, _ in tokens]
    k3 = sum(weight * (math.exp(-d) - 1 + d) for weight, d in zip(weights, differences, strict=True))
    assert output.metrics["reference_kl"] == pytest.approx(k3, rel=1e-6)


@given(
    st.lists(token, min_size=2, max_size=8),
    st.integers(1, 7),
    st.sampled_from(["clip", "cispo", own]),
    st.sampled_from([None, 1.5]),
)
def test_it_is_a_sum_over_tokens(tokens, cut: int, surrogate, cap: float | None) -> None:
    cut = min(cut, len(tokens) - 1)
    batch = batch_of(tokens)
    loss = ClippedPolicyGradient(0.2, 0.28, surrogate=surrogate, correction=tis(cap), **EVERYTHING)
    whole = loss(batch)
    first, second = loss(part(batch, torch.arange(cut))), loss(part(batch, torch.arange(cut, len(tokens))))
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
    ours = ClippedPolicyGradient(0.2, 0.28, correction=NO_CORRECTION)(batch).loss.item()
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


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize(("logprob", "old"), [(-0.1, -900.0), (-900.0, -0.1)])
def test_absurd_ratios_stay_finite(logprob: float, old: float, surrogate: str, cap: float | None) -> None:
    batch = batch_of([(logprob, old, -1.0, 1.0, 0.0, True)])
    output = ClippedPolicyGradient(surrogate=surrogate, correction=tis(cap), kl_coefficient=0.1, kl_estimator="k3")(
        batch
    )
    assert math.isfinite(output.loss.item())
    assert math.isfinite(torch.autograd.grad(output.loss, batch.logprobs)[0].item())
    assert all(map(math.isfinite, output.metrics.values()))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("surrogate", ["clip", "cispo", own])
def test_whoever_composes_it_only_loses_its_correction_without_a_logprob(surrogate, cap: float | None) -> None:
    """Also for a call that was sampled under a grammar, whose logprobs count as missing."""
    known = [(-1.0, -2.0, 1.0, 0.5, 0.0, True), (-1.5, -1.5, 2.0, 0.5, 0.0, True)]
    missing = [known[0], (*known[1][:5], False)]
    loss = ClippedPolicyGradient(surrogate=surrogate, correction=tis(cap))
    outputs = []
    for tokens in (known, missing):
        batch = batch_of(tokens)
        output = loss(batch)
        outputs.append((output.loss.item(), torch.autograd.grad(output.loss, batch.logprobs)[0].tolist()))
    assert outputs[0] == outputs[1]  # the second token was on-policy anyway


def test_a_loss_of_ones_own_that_adds_up_is_refused() -> None:
    batch = batch_of([(-1.0, -1.0, 1.0, 0.5, 0.0, True), (-1.0, -1.0, 1.0, 0.5, 0.0, True)])
    with pytest.raises(
        ConfigError, match=r"<lambda> returned a tensor of shape \(\) for 2 tokens: .* must not add them up"
    ):
        ClippedPolicyGradient(surrogate=lambda tokens: tokens.logprobs.sum())(batch)
    with pytest.raises(ConfigError, match=r"returned 3\.0 for 2 tokens"):
        ClippedPolicyGradient(surrogate=lambda tokens: 3.0)(batch)


def test_entropy_that_is_not_asked_for_cannot_spoil_the_loss() -> None:
    batch = batch_of([(-1.0, -1.0, 1.0, 1.0, math.nan, True)])
    assert ClippedPolicyGradient()(batch).loss.item() == -1.0


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="clip_low=2"):
        ClippedPolicyGradient(clip_low=2.0)
    with pytest.raises(ConfigError, match="clip_high=-1"):
        ClippedPolicyGradient(clip_high=-1.0)
    with pytest.raises(ConfigError, match="kl_coefficient=nan"):
        ClippedPolicyGradient(kl_coefficient=math.nan)
    with pytest.raises(ConfigError, match="kl_coefficient=-1"):
        ClippedPolicyGradient(kl_coefficient=-1.0)
    with pytest.raises(ConfigError, match="unknown kl_estimator 'k4'"):
        ClippedPolicyGradient(kl_estimator="k4")
