"""Weights belong to rollouts, calls and tokens; rows have no say in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import Sample, build_samples
from lightning.batch.build import Normalization
from lightning.batch.trajectory import Trajectory
from lightning.errors import ConfigError
from lightning.testing.trajectories import make_call, make_trajectory

SHORT = make_trajectory([((1,), (2, 3))], rollout="short")
LONG = make_trajectory([((1,), (2, 3, 4)), ((9,), (5, 6, 7, 8, 9))], rollout="long")


def weights_by_call(rows: tuple[Sample, ...]) -> dict[tuple[str, int], float]:
    found = {}
    for row in rows:
        for span in row.spans:
            (value,) = set(row.weights[span.start : span.stop].tolist())
            found[span.rollout, span.seq] = value
    return found


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("token-mean", {("short", 0): 1 / 10, ("long", 0): 1 / 10, ("long", 1): 1 / 10}),
        ("rollout-mean", {("short", 0): 1 / 4, ("long", 0): 1 / 16, ("long", 1): 1 / 16}),
        ("sequence-mean", {("short", 0): 1 / 6, ("long", 0): 1 / 9, ("long", 1): 1 / 15}),
        ("constant", {("short", 0): 1 / 40, ("long", 0): 1 / 40, ("long", 1): 1 / 40}),
    ],
)
def test_by_hand(normalization: Normalization, expected: dict[tuple[str, int], float]) -> None:
    rows = build_samples([SHORT, LONG], [[1.0], [1.0, 1.0]], normalization=normalization, constant_tokens=20)
    assert weights_by_call(rows) == pytest.approx(expected, rel=1e-6)


def test_a_rollout_without_trained_tokens_does_not_dilute_the_others() -> None:
    silent = replace(SHORT, rollout=replace(SHORT.rollout, id="silent"), trainable=(False,))
    rows = build_samples([silent, LONG], [[1.0], [1.0, 1.0]])
    assert weights_by_call(rows) == pytest.approx({("long", 0): 1 / 8, ("long", 1): 1 / 8})


def test_constant_needs_its_constant() -> None:
    with pytest.raises(ConfigError, match="constant_tokens"):
        build_samples([SHORT], [[1.0]], normalization="constant")


def test_an_unknown_normalization_is_named() -> None:
    with pytest.raises(ConfigError, match="'mean': use one of token-mean"):
        build_samples([SHORT], [[1.0]], normalization="mean")  # type: ignore[arg-type]


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["token-mean", "rollout-mean", "sequence-mean", "constant"]),
)
def test_merging_changes_no_weight(lengths: list[list[int]], normalization: Normalization) -> None:
    merged, apart = [], []
    for place, sizes in enumerate(lengths):
        growing, separate, context = [], [], [0]
        for seq, size in enumerate(sizes):
            response = [1] * size
            growing.append((list(context), response))
            separate.append(([100 + seq, *context], response))
            context += [*response, 2]
        merged.append(make_trajectory(growing, rollout=f"r{place}"))
        apart.append(make_trajectory(separate, rollout=f"r{place}"))
    advantages = [[1.0] * len(sizes) for sizes in lengths]
    one = build_samples(merged, advantages, normalization=normalization, constant_tokens=7)
    many = build_samples(apart, advantages, normalization=normalization, constant_tokens=7)
    assert len(one) == len(lengths)
    assert len(many) == sum(map(len, lengths))
    assert weights_by_call(one) == weights_by_call(many)
    if normalization != "constant":
        assert sum(float(row.weights.sum(dtype=np.float64)) for row in one) == pytest.approx(1.0, rel=1e-6)


def test_order_of_rollouts_changes_no_weight() -> None:
    forward = build_samples([SHORT, LONG], [[1.0], [1.0, 1.0]])
    backward = build_samples([LONG, SHORT], [[1.0, 1.0], [1.0]])
    assert weights_by_call(forward) == weights_by_call(backward)


def test_the_buffers_of_the_store_are_not_written_to() -> None:
    call = make_call((1, 2), (3, 4))
    before = (call.prompt_ids.tobytes(), call.response_ids.tobytes(), call.logprobs.tobytes())
    trajectory: Trajectory = replace(make_trajectory(), transitions=(call,))
    (row,) = build_samples([trajectory], [[1.0]])
    row.ids[:] = 0
    row.logprobs[:] = 0
    assert (call.prompt_ids.tobytes(), call.response_ids.tobytes(), call.logprobs.tobytes()) == before
