"""Data that cannot be trained on is refused by name: rollout, attempt and call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightning.batch import build_samples
from lightning.batch.trajectory import Trajectory
from lightning.errors import DataError
from lightning.testing.trajectories import make_call, make_trajectory
from lightning.types import Transition, VersionRun, logprobs, token_ids

CALL = make_call((1, 2), (3, 4), rollout="r7", seq=5)


def with_call(call: Transition) -> Trajectory:
    return replace(make_trajectory(rollout="r7"), transitions=(call,))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (replace(CALL, response_ids=token_ids([3, -9])), "response has token id -9, but ids start at 0"),
        (replace(CALL, prompt_ids=token_ids([1, -2])), "prompt has token id -2"),
        (replace(CALL, logprobs=logprobs([-1.0])), "2 response tokens but 1 logprobs"),
        (replace(CALL, logprobs=logprobs([-1.0, float("nan")])), "logprob is not finite"),
        (replace(CALL, logprobs=logprobs([-1.0, -float("inf")])), "logprob is not finite"),
        (replace(CALL, prompt_ids=token_ids()), "no prompt"),
        (replace(CALL, attempt=2), "not part of attempt 1"),
        (replace(CALL, temperature=float("nan")), "temperature is nan"),
        (replace(CALL, versions=(VersionRun(1, 0),)), "policy versions"),
        (replace(CALL, versions=()), "policy versions"),
        (replace(CALL, versions=(VersionRun(0, 0), VersionRun(-1, 1))), "policy versions"),
        (replace(CALL, versions=(VersionRun(0, 0), VersionRun(2, 1), VersionRun(1, 2))), "policy versions"),
    ],
)
def test_a_broken_call_is_named(call: Transition, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        build_samples([with_call(call)], [[1.0]])
    assert f"rollout r7 attempt {call.attempt} call 5" in str(caught.value)


@pytest.mark.parametrize("advantage", [float("nan"), float("inf"), -1e19])
def test_an_advantage_that_is_no_number_points_at_reward_and_credit(advantage: float) -> None:
    with pytest.raises(DataError, match=r"call 5 .* check the reward and the credit function"):
        build_samples([with_call(CALL)], [[advantage]])


@pytest.mark.parametrize("target", [float("nan"), 1e19])
def test_a_target_that_no_critic_can_learn_is_named(target: float) -> None:
    with pytest.raises(DataError, match=r"r7 attempt 1 call 5 cannot train the head: its target is"):
        build_samples([with_call(CALL)], [[1.0]], value_targets=[[target]])


def test_a_call_of_another_rollout_is_refused() -> None:
    with pytest.raises(DataError, match=r"rollout r8 attempt 1 call 5 .* rollout r7"):
        build_samples([with_call(replace(CALL, rollout="r8"))], [[1.0]])


def test_a_call_is_trained_once() -> None:
    with pytest.raises(DataError, match="occurs twice"):
        build_samples([with_call(CALL), with_call(CALL)], [[1.0], [1.0]])


def test_credit_must_cover_every_call() -> None:
    with pytest.raises(DataError, match="r7 has 1 call, but 1 trainable flag and 2 advantages"):
        build_samples([with_call(CALL)], [[1.0, 1.0]])
    with pytest.raises(DataError, match="2 lists of advantages were given for 1"):
        build_samples([with_call(CALL)], [[1.0], [1.0]])


def test_what_is_not_trained_may_be_broken() -> None:
    untrained = replace(with_call(replace(CALL, response_ids=token_ids([3, -9]))), trainable=(False,))
    assert build_samples([untrained], [[1.0]]) == ()
