"""Law 2 in float64: how calls are cut into rows, merged, ordered, batched or shared changes neither loss nor gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.batch import Sample, TokenSpan, build_samples
from lightning.batch.build import Normalization
from lightning.batch.trajectory import Trajectory
from lightning.config import LoraConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import Loss, LossOutput, StepTokens, TokenBatch
from lightning.testing.trajectories import make_trajectory
from lightning.types import logprobs

LOSS = ClippedPolicyGradient(0.2, 0.28, entropy_coefficient=0.01, correction=NO_CORRECTION)
TOLERANCE = 1e-12


@dataclass(frozen=True)
class CallRatio:
    """One ratio for each call, as GSPO has it, without its clipping (which would hide most gradients)."""

    needs_reference: bool = False

    def prepare(self, step: StepTokens) -> np.ndarray:
        against = step.old_logprobs if step.reference is None else step.reference
        sums = np.bincount(step.calls, step.weights * (step.logprobs - against), len(step.spans))
        return (sums / np.bincount(step.calls, step.weights, len(step.spans)))[step.calls]

    def __call__(self, batch: TokenBatch) -> LossOutput:
        assert batch.prepared is not None
        ratio = (batch.prepared + batch.logprobs - batch.logprobs.detach()).exp()
        return LossOutput(-(batch.weights * ratio * batch.advantages).sum())


@dataclass(frozen=True)
class ReferenceKL:
    """The clipped policy gradient and k3 to the reference (http://joschu.net/blog/kl-approx.html)."""

    needs_reference: bool = True

    def __call__(self, batch: TokenBatch) -> LossOutput:
        assert batch.reference is not None
        gap = batch.reference - batch.logprobs
        return LossOutput(LOSS(batch).loss + (batch.weights * (gap.exp() - 1 - gap)).sum())


@dataclass(frozen=True)
class AmongTop:
    """The clipped policy gradient and the entropy among the most probable tokens."""

    needs_top_logprobs: int = 5

    def __call__(self, batch: TokenBatch) -> LossOutput:
        assert batch.top_logprobs is not None
        among = torch.log_softmax(batch.top_logprobs, -1)
        return LossOutput(LOSS(batch).loss + (batch.weights * (among.exp() * among).sum(-1)).sum())


@pytest.fixture
def engine(exact_norm: None, open_engine: Callable[..., TorchEngine]) -> TorchEngine:
    return open_engine(dtype="float64")


def gradient(
    engine: TorchEngine, samples: Sequence[Sample], kind: str = "linear", budget: int = 10_000, loss: Loss = LOSS
) -> torch.Tensor:
    """The step's gradient, behind its losses."""
    engine._kind, engine._budget = kind, budget  # type: ignore[assignment]
    engine.discard_gradient()
    metrics = engine.forward_backward(samples, loss).metrics
    found = [torch.tensor([metrics["loss"], metrics.get("value_loss", 0.0)], dtype=torch.float64)]
    for parameter in engine._learning().values():
        found.append((torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten())
    return torch.cat(found)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert float(one.norm()) > 0
    assert float((one - other).norm()) <= TOLERANCE * float(one.norm())


def of_calls(sample: Sample, spans: Sequence[TokenSpan]) -> Sample:
    """A row with only some of its calls: weight on their responses, and no token behind the last."""
    own, inside = slice(max(span.stop for span in spans)), np.zeros(len(sample), dtype=bool)
    for span in spans:
        inside[span.start : span.stop] = True
    return replace(
        sample,
        ids=sample.ids[own],
        weights=np.where(inside, sample.weights, 0)[own].astype(np.float32),
        advantages=sample.advantages[own],
        logprobs=sample.logprobs[own],
        versions=sample.versions[own],
        spans=tuple(spans),
    )


def in_two(sample: Sample, random: Random) -> list[Sample]:
    """A row as one or two, its calls dealt out at random."""
    hands: tuple[list[TokenSpan], list[TokenSpan]] = ([], [])
    for span in sample.spans:
        hands[random.randrange(2)].append(span)
    return [of_calls(sample, spans) for spans in hands if spans]


def apart(sample: Sample) -> list[Sample]:
    """One row for each call."""
    return [of_calls(sample, [span]) for span in sample.spans]


def with_logprobs(trajectory: Trajectory, seed: int) -> Trajectory:
    """Sampler logprobs near the policy's, so that some ratios are clipped; one call in four has none."""
    generator = np.random.default_rng(seed)
    calls = []
    for call in trajectory.transitions:
        values = generator.uniform(-9, -2, len(call.response_ids)).tolist() if generator.random() > 0.25 else []
        calls.append(replace(call, logprobs=logprobs(values)))
    return replace(trajectory, transitions=tuple(calls))


def with_targets(samples: Sequence[Sample], random: Random) -> list[Sample]:
    """What the state of each call should have been worth; one in five is not asked."""
    return [
        replace(
            sample,
            spans=tuple(
                replace(span, value_target=random.uniform(-1, 2), value_weight=random.choice([0, 1, 1, 2, 2]) / 16)
                for span in sample.spans
            ),
        )
        for sample in samples
    ]


@st.composite
def rollouts(draw: st.DrawFn) -> list[Trajectory]:
    """One to three rollouts of one or two interleaved agents, each with up to three turns that extend one another; siblings
    begin with the same prompt, and responses of few different tokens agree for a while."""
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    prompts = [generator.integers(0, 320, int(generator.integers(2, 20))).tolist() for _ in range(3)]
    made = []
    for place in range(draw(st.integers(1, 3))):
        agents = draw(st.integers(1, 2))
        contexts = [list(prompts[int(generator.integers(3))]) for _ in range(agents)]
        calls = []
        for _ in range(draw(st.integers(1, 3))):
            for agent in range(agents):
                response = generator.integers(0, 3, int(generator.integers(1, 8))).tolist()
                calls.append((list(contexts[agent]), response))
                contexts[agent] += response + generator.integers(0, 320, int(generator.integers(0, 6))).tolist()
        made.append(with_logprobs(make_trajectory(calls, rollout=f"r{place}"), place))
    return made


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rollouts(),
    st.sampled_from(["token-mean", "rollout-mean", "sequence-mean"]),
    st.integers(0, 2**16).map(Random),
    st.sampled_from([1, 40, 100]),
)
def test_rows_order_and_microbatches_do_not_matter(engine, trajectories, normalization, random, budget) -> None:  # type: ignore[no-untyped-def]
    advantages = [[random.uniform(-2, 2) for _ in trajectory.transitions] for trajectory in trajectories]
    merged = build_samples(trajectories, advantages, normalization=normalization)
    expected = gradient(engine, merged)
    single = [row for sample in merged for row in apart(sample)]
    assert len(single) == sum(len(trajectory.transitions) for trajectory in trajectories)
    shuffled = list(single)
    random.shuffle(shuffled)
    assert_same(expected, gradient(engine, merged, budget=budget))
    assert_same(expected, gradient(engine, single, budget=budget))
    assert_same(expected, gradient(engine, shuffled, budget=100))


VARIANTS: dict[str, tuple[Loss, dict[str, object]]] = {
    "plain": (LOSS, {}),
    "step loss": (CallRatio(), {}),
    "reference": (ReferenceKL(), {}),
    "critic on a frozen trunk": (LOSS, {"critic": True}),
    "critic on a shared trunk": (CallRatio(), {"critic": True, "critic_trunk": "shared"}),
    "most probable tokens, adapters": (AmongTop(), {"lora": LoraConfig(rank=4)}),
    "adapters, reference, critic": (
        CallRatio(needs_reference=True),
        {"lora": LoraConfig(rank=4), "critic": True, "critic_trunk": "shared"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollouts(), st.integers(0, 2**16).map(Random), st.sampled_from([1, 40, 10_000]))
def test_every_kind_of_step_has_one_gradient(exact_norm, variant_engine, variant, trajectories, random, budget) -> None:  # type: ignore[no-untyped-def]
    engine, loss = variant_engine, VARIANTS[variant][0]
    advantages = [[random.uniform(-2, 2) for _ in trajectory.transitions] for trajectory in trajectories]
    merged = list(build_samples(trajectories, advantages, normalization="sequence-mean"))
    if engine._head is not None:
        merged = with_targets(merged, random)
    expected = gradient(engine, merged, "per-call", loss=loss)
    halves = [row for sample in merged for row in in_two(sample, random)]
    random.shuffle(halves)
    assert_same(expected, gradient(engine, merged, "linear", budget, loss))
    assert_same(expected, gradient(engine, merged, "tree", budget, loss))
    assert_same(expected, gradient(engine, halves, "linear", 100, loss))
    assert_same(expected, gradient(engine, halves, "tree", 100, loss))
    assert_same(expected, gradient(engine, halves, "per-call", 100, loss))


@pytest.fixture
def variant_engine(exact_norm: None, open_engine: Callable[..., TorchEngine], variant: str) -> TorchEngine:
    """An engine some way into a training: adapters, critic and, by its reference, weights are no longer the first ones."""
    engine = open_engine(dtype="float64", **VARIANTS[variant][1])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in engine._learning().values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return engine


def test_the_variants_differ_in_their_gradients(exact_norm: None, open_engine: Callable[..., TorchEngine]) -> None:
    """What the property above compares is not the same thing by another name."""
    trajectory = with_logprobs(make_trajectory([((1, 2, 3), (4, 5)), ((1, 2, 3, 4, 5, 6), (7, 8, 9))]), 3)
    rows = with_targets(build_samples([trajectory], [[1.0, -1.0]]), Random(5))
    assert all(span.value_weight for row in rows for span in row.spans)
    found: dict[str, torch.Tensor] = {}
    for name, (loss, arguments) in VARIANTS.items():
        if "adapters" not in name:
            engine = open_engine(dtype="float64", **{"critic": True, **arguments})
            with torch.no_grad():
                for parameter in engine._learning().values():
                    parameter += 0.05 * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape)
            found[name] = gradient(engine, rows, loss=loss)
    same = [
        (one, other)
        for one in found
        for other in found
        if one < other and torch.allclose(found[one], found[other], rtol=1e-6, atol=0)
    ]
    assert same == [("critic on a frozen trunk", "plain")]


@pytest.mark.parametrize("normalization", ["token-mean", "rollout-mean", "sequence-mean", "constant"])
def test_interleaved_agents_in_2_rows_or_4(engine: TorchEngine, normalization: Normalization) -> None:
    a, b = [1, 2, 3], [9, 8, 7, 6]
    calls = [(a, [4, 5]), (b, [5]), ([*a, 4, 5, 11], [12, 13]), ([*b, 5, 14], [15])]
    trajectory = with_logprobs(make_trajectory(calls), 3)
    merged = build_samples([trajectory], [[1.0, -1.0, 0.5, 2.0]], normalization=normalization, constant_tokens=9)
    assert len(merged) == 2
    four = [row for sample in merged for row in apart(sample)]
    assert len(four) == 4
    assert_same(gradient(engine, merged), gradient(engine, four, budget=1))


def test_tokens_behind_the_last_trained_one_change_nothing(engine: TorchEngine) -> None:
    (row,) = build_samples([make_trajectory([((1, 2, 3), (4, 5))])], [[1.0]])
    longer = replace(
        row,
        ids=np.append(row.ids, np.int32(7)),
        weights=np.append(row.weights, np.float32(0)),
        advantages=np.append(row.advantages, np.float32(0)),
        logprobs=np.append(row.logprobs, np.float32(np.nan)),
        versions=np.append(row.versions, np.int32(-1)),
    )
    assert_same(gradient(engine, [row]), gradient(engine, [longer]))


def test_mixed_temperatures_in_one_microbatch(engine: TorchEngine) -> None:
    trajectories = [make_trajectory([((1, 2, 3), (4, 5))], rollout=f"r{place}") for place in range(2)]
    warm, cool = build_samples(trajectories, [[1.0], [1.0]])
    rows = [warm, replace(cool, temperature=0.5)]
    for kind in ("linear", "tree"):
        assert_same(gradient(engine, rows), gradient(engine, rows, kind, 1))
    assert float(gradient(engine, rows)[0]) != pytest.approx(float(gradient(engine, [warm, cool])[0]), rel=1e-3)
