"""Law 2 in float64: how calls are cut into rows, merged, ordered or batched changes neither loss nor gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.batch import Sample, build_samples
from lightning.batch.build import Normalization
from lightning.batch.trajectory import Trajectory
from lightning.engines.torch.engine import TorchEngine
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.testing.trajectories import make_trajectory
from lightning.types import logprobs

LOSS = ClippedPolicyGradient(0.2, 0.28, entropy_coefficient=0.01)
TOLERANCE = 1e-12


@pytest.fixture
def engine(exact_norm: None, open_engine: Callable[..., TorchEngine]) -> TorchEngine:
    return open_engine(dtype="float64")


def gradient(engine: TorchEngine, samples: Sequence[Sample], budget: int = 10_000) -> tuple[float, torch.Tensor]:
    engine._budget = budget
    tally = engine._accumulate(list(samples), LOSS)
    grads = [parameter.grad for parameter in engine._parameters.values()]
    flat = torch.cat([grad.flatten() for grad in grads if grad is not None])
    assert len(grads) == sum(grad is not None for grad in grads)
    return tally.metrics()["loss"], flat.clone()


def apart(sample: Sample) -> list[Sample]:
    """One row for each call: the call's own prompt, and weight on its response only."""
    rows = []
    for span in sample.spans:
        inside = np.zeros(len(sample), dtype=bool)
        inside[span.start : span.stop] = True
        rows.append(
            replace(
                sample,
                ids=sample.ids[: span.stop],
                weights=np.where(inside, sample.weights, 0)[: span.stop].astype(np.float32),
                advantages=sample.advantages[: span.stop],
                logprobs=sample.logprobs[: span.stop],
                versions=sample.versions[: span.stop],
                spans=(span,),
            )
        )
    return rows


def assert_same(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> None:
    assert other[0] == pytest.approx(one[0], rel=TOLERANCE, abs=1e-15)
    assert float((one[1] - other[1]).norm()) <= TOLERANCE * float(one[1].norm())


def with_logprobs(trajectory: Trajectory, seed: int) -> Trajectory:
    """Sampler logprobs near the policy's, so that some ratios are clipped; one call in four has none."""
    generator = np.random.default_rng(seed)
    calls = []
    for call in trajectory.transitions:
        values = generator.uniform(-9, -2, len(call.response_ids)).tolist() if generator.random() > 0.25 else []
        calls.append(replace(call, logprobs=logprobs(values)))
    return replace(trajectory, transitions=tuple(calls))


@st.composite
def rollouts(draw: st.DrawFn) -> list[Trajectory]:
    """One to three rollouts of one or two interleaved agents, each with up to three turns that extend one another."""
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    made = []
    for place in range(draw(st.integers(1, 3))):
        agents = draw(st.integers(1, 2))
        contexts = [generator.integers(0, 320, int(generator.integers(2, 20))).tolist() for _ in range(agents)]
        calls = []
        for _ in range(draw(st.integers(1, 3))):
            for agent in range(agents):
                response = generator.integers(0, 320, int(generator.integers(1, 8))).tolist()
                calls.append((list(contexts[agent]), response))
                contexts[agent] += response + generator.integers(0, 320, int(generator.integers(0, 6))).tolist()
        made.append(with_logprobs(make_trajectory(calls, rollout=f"r{place}"), place))
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rollouts(),
    st.sampled_from(["token-mean", "rollout-mean", "sequence-mean"]),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 40, 100]),
)
def test_rows_order_and_microbatches_do_not_matter(engine, trajectories, normalization, random, budget) -> None:  # type: ignore[no-untyped-def]
    advantages = [[random.uniform(-2, 2) for _ in trajectory.transitions] for trajectory in trajectories]
    merged = build_samples(trajectories, advantages, normalization=normalization)
    reference = gradient(engine, merged)
    single = [row for sample in merged for row in apart(sample)]
    assert len(single) == sum(len(trajectory.transitions) for trajectory in trajectories)
    shuffled = list(single)
    random.shuffle(shuffled)
    assert_same(reference, gradient(engine, merged, budget))
    assert_same(reference, gradient(engine, single, budget))
    assert_same(reference, gradient(engine, shuffled, 100))


@pytest.mark.parametrize("normalization", ["token-mean", "rollout-mean", "sequence-mean", "constant"])
def test_interleaved_agents_in_2_rows_or_4(engine: TorchEngine, normalization: Normalization) -> None:
    a, b = [1, 2, 3], [9, 8, 7, 6]
    calls = [(a, [4, 5]), (b, [5]), ([*a, 4, 5, 11], [12, 13]), ([*b, 5, 14], [15])]
    trajectory = with_logprobs(make_trajectory(calls), 3)
    merged = build_samples([trajectory], [[1.0, -1.0, 0.5, 2.0]], normalization=normalization, constant_tokens=9)
    assert len(merged) == 2
    four = [row for sample in merged for row in apart(sample)]
    assert len(four) == 4
    assert_same(gradient(engine, merged), gradient(engine, four, 1))


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
    assert_same(gradient(engine, rows), gradient(engine, rows, 1))
    assert gradient(engine, rows)[0] != pytest.approx(gradient(engine, [warm, cool])[0], rel=1e-3)
