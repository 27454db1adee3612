"""Which calls belong to the component of interest, and which of their tokens were trained as they were sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from lightning.algorithms.protocol import Batch
from lightning.batch import build_samples, transition_digest
from lightning.engines.protocol import StepResult
from lightning.testing.trajectories import make_group
from lightning.trainer.loop import Loop
from lightning.trainer.training_data import is_trainable
from lightning.types import Caller, token_ids

WRITER = Caller("writer", ("crew", "writer"))


@pytest.mark.parametrize(
    ("globs", "trained"),
    [
        ([], True),
        (["writer"], True),
        (["crew/*"], True),
        (["judge"], False),
        (["!judge"], True),
        (["!writer"], False),
        (["crew/*", "!writer"], False),
        (["crew/*", "!judge"], True),
        (["model:gpt-4o"], True),
        (["model:gpt-3*"], False),
        (["!model:gpt-4o"], False),
        (["!model:gpt-3*"], True),
        (["writer", "!model:gpt-4*"], False),
        (["[!j]*"], True),
    ],
)
def test_globs_are_of_the_path_the_name_and_the_model(globs: list[str], trained: bool) -> None:
    assert is_trainable(WRITER, globs, "gpt-4o") is trained


@pytest.mark.parametrize(("trained", "drift"), [((7, 8), 0), ((7, 9), 2)])
def test_tokens_that_are_not_the_sampled_ones_are_counted(trained: tuple[int, int], drift: int) -> None:
    """By what the groups had before an algorithm saw them."""
    group = make_group([1.0], calls=[((1,), (7, 8))])
    (member,) = group.trajectories
    (sampled,) = member.transitions
    call = replace(sampled, response_ids=token_ids(trained))
    rows = build_samples([replace(member, transitions=(call,))], [[1.0]])
    result = StepResult({}, {call.key: transition_digest(call)})
    assert Loop.drift(cast("Loop", None), [group], Batch(rows, ()), result) == drift
    skipped = {"skipped_nonfinite": 1.0, "policy/writer/skipped_nonfinite": 1.0, "policy/editor/skipped_nonfinite": 0.0}
    for policy, counted in (("writer", 0), ("editor", drift)):
        own = Batch(tuple(replace(row, policy=policy) for row in rows), ())
        assert Loop.drift(cast("Loop", None), [group], own, StepResult(skipped, result.seen)) == counted
    assert Loop.drift(cast("Loop", None), [group], Batch(rows, ()), StepResult({"skipped_nonfinite": 1.0}, {})) == 0
