"""The states that a critic is asked to value are those that the step may train, in the same rows."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning.batch import build_samples
from lightning.batch.build import state_rows, with_values
from lightning.batch.trajectory import Group
from lightning.testing.trajectories import make_trajectory
from lightning.types import logprobs

CALLS = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([9, 9], [8])]


def test_the_rows_are_those_of_the_step() -> None:
    whole = make_trajectory(CALLS, rollout="whole")
    partly = make_trajectory(CALLS, rollout="partly", trainable=[True, False, False])
    rows = state_rows([Group("a", (whole,)), Group("b", (partly,))])
    step = build_samples([whole, partly], [[1.0, 2.0, 3.0]] * 2)
    assert [(row.ids.tolist(), row.spans) for row in rows] == [(row.ids.tolist(), row.spans) for row in step]
    assert [(span.rollout, span.seq) for row in rows for span in row.spans] == [
        ("whole", 0), ("whole", 1), ("whole", 2), ("partly", 0),
    ]  # fmt: skip


def test_rollouts_that_cannot_be_trained_are_not_valued() -> None:
    good, bad = (make_trajectory(CALLS, rollout=name) for name in ("good", "bad"))
    flawed = replace(bad.transitions[1], logprobs=logprobs([-math.inf]))
    bad = replace(bad, transitions=(bad.transitions[0], flawed, bad.transitions[2]))
    rows = state_rows([Group("a", (bad, good))])
    assert {span.rollout for row in rows for span in row.spans} == {"good"}
    assert state_rows([]) == ()


def test_values_come_to_their_calls() -> None:
    group = Group("a", tuple(make_trajectory(CALLS, rollout=name) for name in ("r0", "r1")))
    (valued,) = with_values([group], {("r0", 1, 0): 0.5, ("r0", 1, 2): -1.0, ("r1", 1, 1): 2.0})
    first, second = (member.values for member in valued.trajectories)
    assert (first[0], math.isnan(first[1]), first[2]) == (0.5, True, -1.0)
    assert (math.isnan(second[0]), second[1], math.isnan(second[2])) == (True, 2.0, True)
    assert [member.transitions for member in valued.trajectories] == [
        member.transitions for member in group.trajectories
    ]
