"""Calls that several policies answered: no row, and no weight, mixes two of them."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from lightning.algorithms.protocol import Batch
from lightning.batch import Sample, build_samples
from lightning.batch.build import Normalization
from lightning.batch.trajectory import Trajectory
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.training_data import batch_digest, is_trainable
from lightning.types import Caller, VersionRun

CALLS = [((1,), (2, 3)), ((1, 2, 3, 4), (5,)), ((1, 2, 3, 4, 5, 6), (7, 8, 9))]


def answered_by(trajectory: Trajectory, *policies: str) -> Trajectory:
    calls = (
        replace(call, versions=(VersionRun(0, 3, policy),))
        for call, policy in zip(trajectory.transitions, policies, strict=True)
    )
    return replace(trajectory, transitions=tuple(calls))


ONE = answered_by(make_trajectory(CALLS, rollout="one"), "writer", "checker", "writer")
TWO = answered_by(make_trajectory(CALLS[:2], rollout="two"), "checker", "checker")


def of(policy: str, rows: tuple[Sample, ...]) -> list[tuple[list[int], list[float]]]:
    return [(row.ids.tolist(), row.weights.tolist()) for row in rows if row.policy == policy]


@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_each_policys_rows_are_those_of_a_step_of_its_own(normalization: Normalization) -> None:
    def rows(*trajectories: Trajectory) -> tuple[Sample, ...]:
        advantages = [[1.0] * len(each.transitions) for each in trajectories]
        targets = [[0.5] * len(each.transitions) for each in trajectories]
        return build_samples(
            trajectories, advantages, normalization=normalization, constant_tokens=20, value_targets=targets
        )

    together = rows(ONE, TWO)
    assert {row.policy for row in together} == {"writer", "checker"}
    for policy in ("writer", "checker"):
        only = [
            replace(each, trainable=tuple(call.policy == policy for call in each.transitions)) for each in (ONE, TWO)
        ]
        alone = rows(*only)
        assert of(policy, together) == of(policy, alone)
        shares, own = (
            [span.value_weight for row in found if row.policy == policy for span in row.spans]
            for found in (together, alone)
        )
        assert shares == own


def test_a_call_that_continues_another_policys_call_has_a_row_of_its_own() -> None:
    rows = build_samples([ONE], [[1.0] * 3])
    assert [(row.policy, [span.seq for span in row.spans]) for row in rows] == [("writer", [0, 2]), ("checker", [1])]
    same = build_samples([answered_by(ONE, "a", "a", "a")], [[1.0] * 3])
    assert [[span.seq for span in row.spans] for row in same] == [[0, 1, 2]]


def test_a_digest_knows_whose_row_it_is() -> None:
    rows = build_samples([ONE], [[1.0] * 3])
    renamed = tuple(replace(row, policy="other") for row in rows)
    assert batch_digest(Batch(rows, ())) != batch_digest(Batch(renamed, ()))
    assert all(np.array_equal(one.ids, other.ids) for one, other in zip(rows, renamed, strict=True))


@pytest.mark.parametrize(
    ("globs", "policy", "is_trained"),
    [
        ((), "writer", True),
        (("!policy:checker", "!policy:base"), "writer", True),
        (("!policy:checker", "!policy:base"), "checker", False),
        (("!policy:checker", "!policy:base"), "base", False),
        (("policy:wr*",), "writer", True),
        (("policy:wr*",), "rewriter", False),
        (("team/*", "!policy:writer"), "writer", False),
    ],
)
def test_globs_take_out_policies(globs: tuple[str, ...], policy: str, is_trained: bool) -> None:
    assert is_trainable(Caller("author", ("team",)), globs, "gpt", policy) is is_trained
