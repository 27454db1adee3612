"""DPO over whole rollouts, taken apart into tokens, against the paper's formula written down for pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.batch.sample import TokenSpan
from lightning.batch.trajectory import Group, Trajectory
from lightning.errors import ConfigError, EngineError
from lightning.losses.protocol import StepLoss, StepTokens, TokenBatch, needs_reference
from lightning_finetuning.dpo import DPO, PreferenceLoss
from torch.nn.functional import logsigmoid

REWARDS = [0.0, 1.0, 0.5, 1.0]


def groups(tiny) -> list[Group]:
    return [
        tiny.group("a", REWARDS, [[3, 1], [2], [5, 2, 4], [1]]),
        tiny.group("b", [0.25, 1.0], [[4], [2, 2]], seed=1),
        tiny.group("equal", [1.0, 1.0], [[4], [2, 2]], seed=2),
    ]


def margin(tiny, member: Trajectory, mean: bool) -> torch.Tensor:
    """log pi(y|x) - log pi_ref(y|x) of a rollout: over all of its calls."""
    terms = [
        tiny.call_logprobs(call) - tiny.call_logprobs(call, tiny.reference)
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if trainable
    ]
    every = torch.cat(terms)
    return every.mean() if mean else every.sum()


def by_the_paper(tiny, algorithm: DPO, given_groups: list[Group]) -> tuple[torch.Tensor, list[float]]:
    """Equation 7 for every pair (with label smoothing: cDPO), and the pairs' h."""
    losses, hs = [], []
    for group in given_groups:
        members = group.trajectories
        pairs = [(won, lost) for won in members for lost in members if won.reward - lost.reward > algorithm.margin]
        if algorithm.pairs == "best-worst":
            best = max(members, key=lambda member: member.reward)
            worst = min(members, key=lambda member: member.reward)
            pairs = [(best, worst)] if best.reward - worst.reward > algorithm.margin else []
        for won, lost in pairs:
            mean = algorithm.length_normalized
            h = algorithm.beta * (margin(tiny, won, mean) - margin(tiny, lost, mean))
            smooth = algorithm.label_smoothing
            losses.append(-(1 - smooth) * logsigmoid(h) - smooth * logsigmoid(-h))
            hs.append(h.item())
    return torch.stack(losses).mean(), hs


@pytest.mark.parametrize(
    "algorithm",
    [
        DPO(),
        DPO(beta=0.5, label_smoothing=0.1),
        DPO(beta=2.0, length_normalized=True),
        DPO(pairs="all"),
        DPO(pairs="all", margin=0.5, beta=0.7, label_smoothing=0.2, length_normalized=True),
    ],
    ids=lambda algorithm: f"{algorithm.pairs}-{algorithm.beta}",
)
def test_loss_gradient_and_metrics_are_the_papers(tiny, algorithm: DPO) -> None:
    batch = algorithm.batch(groups(tiny))
    mine = tiny.step(batch.samples, batch.loss)
    expected, hs = by_the_paper(tiny, algorithm, groups(tiny))
    assert mine.loss == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(mine.gradient, tiny.gradient(expected), rtol=1e-9, atol=1e-12)
    weight = sum(float(sample.weights.sum(dtype=np.float64)) for sample in batch.samples)
    assert mine.metrics["dpo_loss"] / weight == pytest.approx(expected.item(), rel=1e-9)
    assert mine.metrics["dpo_accuracy"] / weight == pytest.approx(np.mean(np.array(hs) > 0))
    assert mine.metrics["dpo_margin"] / weight == pytest.approx(np.mean(hs))
    apart = mine.metrics["dpo_chosen"] - mine.metrics["dpo_rejected"]
    assert apart == pytest.approx(mine.metrics["dpo_margin"])


def test_calls_that_are_not_trained_are_no_part_of_a_pair(tiny) -> None:
    first = groups(tiny)[0]
    members = tuple(
        replace(member, trainable=(True, *[False] * (len(member.transitions) - 1))) for member in first.trajectories
    )
    batch = DPO().batch([Group("a", members)])
    expected, _ = by_the_paper(tiny, DPO(), [Group("a", members)])
    mine = tiny.step(batch.samples, batch.loss)
    torch.testing.assert_close(mine.gradient, tiny.gradient(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_pairs_may_be_cut_anywhere_and_in_any_order(tiny, random, size: int) -> None:
    batch = DPO(pairs="all", label_smoothing=0.1).batch(groups(tiny))

    def cut(count: int) -> list[list[int]]:
        order = random.sample(range(count), count)
        return [order[start : start + size] for start in range(0, count, size)]

    whole = tiny.step(batch.samples, batch.loss)
    pieces = tiny.step(random.sample(batch.samples, len(batch.samples)), batch.loss, cut)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-12)
    torch.testing.assert_close(pieces.gradient, whole.gradient, rtol=1e-12, atol=1e-15)
    assert pieces.metrics == pytest.approx(whole.metrics, rel=1e-12)


@pytest.mark.slow
def test_steps_down_the_gradient_prefer_the_better_rollouts(tiny) -> None:
    own = type(tiny)(seed=3)
    algorithm = DPO(pairs="all", beta=0.5)
    accuracy = []
    for _ in range(60):
        batch = algorithm.batch(groups(own))
        result = own.step(batch.samples, batch.loss)
        accuracy.append(result.metrics["dpo_accuracy"])
        with torch.no_grad():
            own.table -= 2.0 * result.gradient
    assert accuracy[-1] == pytest.approx(1.0)
    assert accuracy[0] < 0.9


def step_of(margins: list[float]) -> StepTokens:
    """Two rollouts of one token each, at these margins over the reference."""
    zeros, halves = np.zeros(2), np.full(2, 0.5, np.float32)
    return StepTokens(
        np.array(margins), zeros, halves, halves, np.zeros(2, np.int32), zeros, np.arange(2),
        (TokenSpan("won", 1, 0, 1, 2), TokenSpan("lost", 1, 0, 1, 2)),
    )  # fmt: skip


@pytest.mark.parametrize(("margins", "expected"), [([1e5, -1e5], 0.0), ([-1e5, 1e5], -0.1)])
def test_absurd_margins_stay_finite(margins: list[float], expected: float) -> None:
    loss = PreferenceLoss((("won", "lost"),))
    prepared = loss.prepare(step_of(margins))
    np.testing.assert_allclose(prepared * 0.5, [expected, -expected], atol=1e-12)


def test_a_copy_that_did_not_prepare_has_the_same_gradient_and_no_value() -> None:
    loss = PreferenceLoss((("won", "lost"),))
    prepared = torch.from_numpy(loss.prepare(step_of([0.3, -0.2])))
    current = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    rest = [torch.full((2,), 0.5, dtype=torch.float64) for _ in range(4)]
    batch = TokenBatch(current, *rest, torch.ones(2).bool(), prepared=prepared)
    here, there = loss(batch), PreferenceLoss((("won", "lost"),))(batch)
    assert torch.autograd.grad(here.loss, current)[0].tolist() == torch.autograd.grad(there.loss, current)[0].tolist()
    assert (there.loss.item(), dict(there.metrics)) == (0.0, {})
    assert here.loss.item() == pytest.approx(np.log1p(np.exp(-0.05)))


def test_it_asks_for_the_reference_and_for_preparation() -> None:
    loss = PreferenceLoss((("won", "lost"),))
    assert needs_reference(loss)
    assert isinstance(loss, StepLoss)
    with pytest.raises(EngineError, match="the engine gave none"):
        loss.prepare(replace(step_of([0.0, 0.0]), reference=None))
    with pytest.raises(EngineError, match="rollout other is part of a pair"):
        PreferenceLoss((("won", "other"),)).prepare(step_of([0.0, 0.0]))
    one = torch.ones(1)
    with pytest.raises(EngineError, match="has to be prepared"):
        loss(TokenBatch(one, one, one, one, one, one.bool()))


@pytest.mark.parametrize("fields", [{"beta": 0.0}, {"beta": float("inf")}, {"label_smoothing": 0.5}])
def test_impossible_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        PreferenceLoss(**fields)
