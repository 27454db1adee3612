"""The correction of the mismatch between trainer and sampler: against a slow and obvious one, however rows are cut, and with
one outlier in the step."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms import from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group
from lightning.engines.rows import Tally
from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.losses.policy_gradient import CallCorrected, ClippedPolicyGradient, SequencePolicyGradient
from lightning.losses.protocol import Loss, StepLoss, TokenBatch
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.runs import describe_algorithm, rebuild_algorithm

from tests.core.losses.conftest import TinyEngine

KINDS = ("mask", "tis", "mis", "icepop", "none")
LEVELS = ("token", "sequence", "geometric")


def good_and_bad(tiny: TinyEngine, tokens: int) -> list[Sample]:
    """The rows of a step whose gradient is large: good rollouts say 0 to 2, bad ones 3 to 6. The sampler is the trainer."""
    numbers, members = np.random.default_rng(0), []
    for index in range(8):
        low, high = (0, 3) if index % 2 else (3, 7)
        calls = [([1, 2], numbers.integers(low, high, tokens // 16).tolist()) for _ in range(2)]
        members.append(make_trajectory(calls, rollout=f"g/{index}", group="g", index=index, reward=float(index % 2)))
    sampler, tiny.sampler = tiny.sampler, tiny.table.detach()
    try:
        group = Group("g", tuple(map(tiny.sampled, members)))
    finally:
        tiny.sampler = sampler
    return list(LightningRL("grpo").batch([group]).samples)


def with_outlier(samples: Sequence[Sample], log_ratio: float, sign: int) -> list[Sample]:
    """The rows with one token, of an advantage of this sign, whose trainer and sampler differ so much."""
    found = list(samples)
    row, sample = next(
        (row, one) for row, one in enumerate(found) if (sign * one.advantages[one.weights != 0] > 0).all()
    )
    place = int(np.flatnonzero(sample.weights)[5])
    logprobs = sample.logprobs.copy()
    logprobs[place] -= log_ratio
    found[row] = replace(sample, logprobs=logprobs)
    return found


@pytest.fixture(scope="module")
def rows(tiny: TinyEngine) -> list[Sample]:
    return good_and_bad(tiny, 960)


@pytest.mark.parametrize("name", PRESETS)
def test_one_outlier_moves_the_gradient_by_at_most_a_hundredth(
    tiny: TinyEngine, rows: list[Sample], name: LowLevel
) -> None:
    loss = LightningRL(name).loss
    expected = tiny.step(rows, loss)
    assert expected.metrics["masked_share"] == 0.0
    for log_ratio, sign in itertools.product((math.log(98_716), -math.log(98_716)), (1, -1)):
        found = tiny.step(with_outlier(rows, log_ratio, sign), loss)
        assert (found.gradient - expected.gradient).norm() <= 0.01 * expected.gradient.norm()
        assert 0.0 < found.metrics["masked_share"] < 0.002


def test_without_a_correction_one_outlier_is_the_whole_gradient(tiny: TinyEngine, rows: list[Sample]) -> None:
    loss = LightningRL("grpo", correction="none").loss
    assert isinstance(loss, ClippedPolicyGradient)
    open_side = replace(loss, correction=NO_CORRECTION)
    expected, spoilt = tiny.step(rows, open_side), with_outlier(rows, math.log(98_716), -1)
    assert tiny.step(spoilt, open_side).gradient.norm() > 10 * expected.gradient.norm()
    bounded = tiny.step(spoilt, loss)  # dual clip by itself
    assert (bounded.gradient - expected.gradient).norm() <= 0.01 * expected.gradient.norm()
    assert bounded.metrics["dual_clip_fraction"] > 0.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("low_level", ["grpo", "gspo"])
def test_how_rows_are_cut_changes_nothing(tiny: TinyEngine, low_level: LowLevel, kind: str, level: str) -> None:
    groups = [
        tiny.group("a", [1.0, 0.0, 0.5], [[5, 3], [4], [2, 6]]),
        tiny.group("b", [0.0, 1.0], [[7], [3, 3]], seed=1),
    ]
    correction = Correction(kind, level)  # type: ignore[arg-type]
    algorithm = LightningRL(low_level, group_size=3, correction=correction, clip_low=0.2, clip_high=0.3)
    samples = algorithm.batch(groups).samples
    whole = tiny.step(samples, algorithm.loss)
    for cut in (lambda n: [[i] for i in range(n)], lambda n: [range(n)[::2], range(n)[1::2]]):
        found = tiny.step(samples, algorithm.loss, cut)
        torch.testing.assert_close(found.gradient, whole.gradient)
        assert found.loss == pytest.approx(whole.loss)
        assert found.metrics == pytest.approx(whole.metrics)


token = st.tuples(
    st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-3, 3), st.floats(0.01, 1), st.booleans(), st.integers(0, 2)
)


@given(st.lists(token, min_size=1, max_size=8), st.sampled_from(KINDS), st.sampled_from(LEVELS), st.floats(1.1, 4))
def test_against_a_slow_and_obvious_one(tokens, kind: str, level: str, dual: float) -> None:
    """Value, gradient and metrics, token by token, in plain Python, for the clipped surrogate at every kind and level."""
    correction = Correction(kind, level, dual_clip=dual)  # type: ignore[arg-type]
    logprobs, old, advantages, weights, has_old, calls = zip(*tokens, strict=True)
    rows = [lp - sampled if known else 0.0 for lp, sampled, known in zip(logprobs, old, has_old, strict=True)]
    value = masked = 0.0
    gradient, rhos = [], []
    for place, (_, _, advantage, weight, _, call) in enumerate(tokens):
        own = [row for row, other in zip(rows, calls, strict=True) if other == call]
        log_rho = {"token": rows[place], "sequence": sum(own), "geometric": sum(own) / len(own)}[level]
        rho, rhos = math.exp(log_rho), [*rhos, math.exp(rows[place])]
        low, high = correction.bounds
        c = {"tis": min(rho, high), "mis": rho, "icepop": rho}.get(kind, 1.0)
        if kind in ("mask", "mis", "icepop") and not low <= rho <= high:
            c, masked = 0.0, masked + weight
        ratio = 1.0 if correction.decoupled else math.exp(rows[place])
        clipped = min(max(ratio, 0.8), 1.28)
        objective = min(ratio * advantage, clipped * advantage)
        slope = ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
        if advantage < 0 and objective < dual * advantage:
            objective, slope = dual * advantage, 0.0
        value -= weight * c * objective
        gradient.append(-weight * c * slope)
    current = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    known = torch.tensor(has_old)
    log_rhos = torch.tensor(rows, dtype=torch.float64)
    sums = torch.zeros(3, dtype=torch.float64).index_add_(0, torch.tensor(calls), log_rhos)[list(calls)]
    counts = torch.bincount(torch.tensor(calls), minlength=3)[list(calls)]
    batch = TokenBatch(
        logprobs=current,
        old_logprobs=torch.where(known, torch.tensor(old, dtype=torch.float64), current.detach()),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
        entropy=torch.zeros(len(tokens), dtype=torch.float64),
        has_old=known,
        prepared=sums if level == "sequence" else sums / counts,
    )
    loss = (ClippedPolicyGradient if level == "token" else CallCorrected)(0.2, 0.28, correction=correction)
    output = loss(batch)
    assert output.loss.item() == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert torch.autograd.grad(output.loss, current)[0].tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)
    assert output.metrics["masked_share"] == pytest.approx(masked)
    tally = Tally()
    tally.add(batch, output.loss.item(), output.metrics)
    compared = [(weight, rho) for weight, rho, each in zip(weights, rhos, has_old, strict=True) if each]
    total = sum(weight for weight, _ in compared)
    metrics = tally.metrics()
    if total:
        first, second = (sum(weight * rho**power for weight, rho in compared) for power in (1, 2))
        assert metrics["ess"] == pytest.approx(first * first / (second * total))
        assert 0.0 < metrics["ess"] <= 1.0 + 1e-9
        k3 = sum(weight * (rho - 1 - math.log(rho)) for weight, rho in compared)
        assert metrics["approx_kl"] == pytest.approx(k3 / total, rel=1e-6, abs=1e-9)
    else:
        assert not {"ess", "approx_kl", "ratio", "ratio_max"} & metrics.keys()
    assert "rho" not in metrics


@pytest.mark.parametrize("compared", [0, 1, 3])
def test_tokens_without_a_sampler_logprob_are_in_no_comparison(compared: int) -> None:
    """In a later update of a step they are beside what the policy was at its beginning."""
    count, known = 10, torch.arange(10) < compared
    current = torch.full((count,), -2.0)
    batch = TokenBatch(
        logprobs=current,
        old_logprobs=torch.where(known, current, current + 0.7),
        advantages=torch.ones(count),
        weights=torch.full((count,), 1.0 / count),
        entropy=torch.zeros(count),
        has_old=known,
    )
    tally = Tally()
    output = ClippedPolicyGradient()(batch)
    tally.add(batch, output.loss.item(), output.metrics)
    metrics = {
        name: value for name, value in tally.metrics().items() if name in ("ess", "ratio", "approx_kl", "ratio_max")
    }
    agreed = {"ess": 1.0, "ratio": 1.0, "approx_kl": 0.0, "ratio_max": 1.0}
    assert metrics == pytest.approx(agreed if compared else {}, abs=1e-6)


def test_gspo_leaves_a_masked_token_out_of_its_calls_ratio(tiny: TinyEngine) -> None:
    """The other tokens of the call have the gradient that they have without it."""
    samples = good_and_bad(tiny, 160)
    loss = SequencePolicyGradient(0.2, 0.2)
    place = int(np.flatnonzero(samples[0].weights)[5])
    rows = list(samples)
    logprobs, weights = samples[0].logprobs.copy(), samples[0].weights.copy()
    logprobs[place] -= 11.5
    rows[0] = replace(samples[0], logprobs=logprobs)
    weights[place] = 0.0
    without = [replace(samples[0], weights=weights), *samples[1:]]
    torch.testing.assert_close(tiny.step(rows, loss).gradient, tiny.step(without, loss).gradient)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", lambda tokens: -tokens.advantages * tokens.logprobs])
def test_a_masked_token_of_no_probability_spoils_nothing(surrogate) -> None:
    current = torch.tensor([-1.0, -math.inf], requires_grad=True)
    ones = torch.ones(2)
    batch = TokenBatch(current, torch.tensor([-1.0, -0.5]), ones, ones, ones, ones.bool())
    output = ClippedPolicyGradient(surrogate=surrogate)(batch)
    (gradient,) = torch.autograd.grad(output.loss, current)
    assert gradient.tolist() == [-1.0, 0.0]
    assert math.isfinite(output.loss.item())
    assert output.metrics["masked_share"] == 1.0


def test_what_is_no_number_is_not_hidden_by_a_mask() -> None:
    current = torch.tensor([math.nan], requires_grad=True)
    one = torch.ones(1)
    assert math.isnan(ClippedPolicyGradient()(TokenBatch(current, -one, one, one, one, one.bool())).loss.item())


def test_which_loss_prepares_and_what_a_loss_of_ones_own_has() -> None:
    def prepares(loss: Loss) -> bool:
        return isinstance(loss, StepLoss)

    assert not prepares(LightningRL("grpo").loss)
    assert isinstance(LightningRL("grpo", correction=Correction(level="sequence")).loss, CallCorrected)
    assert isinstance(LightningRL("gspo", correction=Correction("mis", "sequence")).loss, CallCorrected)
    own = from_loss(lambda tokens: -tokens.logprobs)
    assert own().correction == NO_CORRECTION
    assert own(correction="mask").correction == Correction()
    with pytest.raises(ConfigError, match="which CallCorrected has"):
        ClippedPolicyGradient(correction=Correction(level="sequence"))
    with pytest.raises(ConfigError, match="cannot be used with ratios of whole calls"):
        SequencePolicyGradient(correction=Correction("tis"))


def test_a_record_makes_it_again() -> None:
    for correction in (None, "icepop", Correction("tis", "geometric", high=3.0), NO_CORRECTION):
        algorithm = LightningRL("grpo", correction=correction)  # type: ignore[arg-type]
        described = json.loads(json.dumps(describe_algorithm(algorithm)))
        assert rebuild_algorithm({"algorithm": described}) == algorithm


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "maks"}, "unknown kind 'maks'"),
        ({"level": "call"}, "unknown level 'call'"),
        ({"low": 1.0}, "1, the ratio where trainer and sampler agree, must lie between"),
        ({"high": 0.9}, "1, the ratio where trainer and sampler agree, must lie between"),
        ({"kind": "tis", "high": 0.0}, "high=0.0 must be positive"),
        ({"kind": "tis", "low": 0.5}, "low=0.5 does nothing"),
        ({"kind": "none", "high": 2.0}, "high=2.0 does nothing"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 must be greater than 1"),
    ],
)
def test_impossible_corrections_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Correction(**given)  # type: ignore[arg-type]
    assert said in str(raised.value)
