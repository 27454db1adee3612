"""Advantages against a critic's values, by hand and beside the sum that defines them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import centre
from lightning.errors import ConfigError, DataError
from lightning.testing.trajectories import make_trajectory
from lightning.types import StepReward
from lightning_credits import Critic

CALL = ((1, 2), (3,))
NAN = float("nan")
number = st.floats(-10, 10)


def valued(
    values: tuple[float, ...],
    *,
    reward: float = 1.0,
    steps: dict[int, float] | None = None,
    trainable: tuple[bool, ...] | None = None,
) -> Trajectory:
    made = make_trajectory([CALL] * len(values), reward=reward, trainable=trainable)
    given = tuple(StepReward(value, "r", f"rollout-0/{call}") for call, value in (steps or {}).items())
    return replace(made, values=values, step_rewards=given)


def spread(credit: Critic, trajectory: Trajectory) -> list[float]:
    (found,) = credit(Group("g", (trajectory,)), centre)
    assert found.dtype == np.float64
    return list(found)


def test_one_call_ahead_is_the_difference_of_two_values() -> None:
    assert spread(Critic(lam=0.0), valued((0.5, 0.75, 0.25))) == [0.25, -0.5, 0.75]


def test_to_the_end_is_the_return_minus_the_value() -> None:
    found = spread(Critic(lam=1.0), valued((0.5, 0.75, 0.25), steps={0: -0.5, 1: 0.25}))
    assert found == [1 - 0.5 + 0.25 - 0.5, 1 + 0.25 - 0.75, 1 - 0.25]


@given(st.lists(st.tuples(number, number), min_size=1, max_size=6), number, st.floats(0, 1), st.floats(0, 1))
def test_it_is_the_sum_of_the_paper(calls: list[tuple[float, float]], reward: float, gamma: float, lam: float) -> None:
    values = [value for value, _ in calls]
    rewards = [step for _, step in calls]
    found = spread(Critic(gamma, lam), valued(tuple(values), reward=reward, steps=dict(enumerate(rewards))))
    rewards[-1] += reward
    ahead = [*values[1:], 0.0]
    deltas = [earned + gamma * after - before for earned, after, before in zip(rewards, ahead, values, strict=True)]
    count = len(calls)
    sums = [sum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, count)) for k in range(count)]
    np.testing.assert_allclose(found, sums, atol=1e-9)


def test_untrained_calls_are_the_environment() -> None:
    trajectory = valued(
        (NAN, 0.5, NAN, 0.25, NAN),
        steps={0: 8.0, 1: 0.125, 2: -0.25, 4: 0.5},
        trainable=(False, True, False, True, False),
    )
    assert spread(Critic(lam=0.0), trajectory) == [0.0, 0.125 - 0.25 + 0.25 - 0.5, 0.0, 0.5 + 1.0 - 0.25, 0.0]


def test_a_value_of_a_call_that_is_marked_as_untrained_is_refused() -> None:
    made = valued((0.5, 0.25))
    first, last = made.transitions
    marked = replace(made, transitions=(replace(first, untrained="title"), last))
    with pytest.raises(
        DataError, match=r"call 0 is recorded and not trained \(title\), but its state has the critic's value"
    ):
        spread(Critic(), marked)
    assert spread(Critic(lam=0.0), replace(marked, values=(NAN, 0.25))) == [0.0, 0.75]


@given(st.lists(number, min_size=1, max_size=6), number, st.floats(0, 1))
def test_targets_without_bias_are_returns(values: list[float], reward: float, gamma: float) -> None:
    targets = Critic(gamma, 1.0).value_targets(valued(tuple(values), reward=reward))
    left = np.arange(len(values) - 1, -1, -1)
    np.testing.assert_allclose(targets, reward * gamma**left, atol=1e-9)


def test_targets_of_untrained_calls_are_nan() -> None:
    trajectory = valued((NAN, 0.5), trainable=(False, True))
    np.testing.assert_array_equal(Critic().value_targets(trajectory), [NAN, 1.0])


def test_a_rollout_in_which_nothing_is_trained_needs_no_values() -> None:
    trajectory = make_trajectory([CALL], trainable=(False,))
    assert spread(Critic(), trajectory) == [0.0]
    assert np.isnan(Critic().value_targets(trajectory)).all()


def test_without_values_it_says_what_the_algorithm_lacks() -> None:
    with pytest.raises(DataError, match=r"rollout rollout-0 has no values.*head = \"critic\""):
        spread(Critic(), make_trajectory([CALL]))


def test_a_trained_call_without_a_value_is_named() -> None:
    with pytest.raises(DataError, match=r"rollout-0 attempt 1 call 1 is trained, but .* nan"):
        spread(Critic(), valued((0.5, NAN)))


def test_values_of_other_calls_are_refused() -> None:
    with pytest.raises(DataError, match="2 calls, but values of 1"):
        spread(Critic(), replace(make_trajectory([CALL] * 2), values=(0.5,)))


@pytest.mark.parametrize(("field", "value"), [("gamma", 1.5), ("lam", -0.1)])
def test_a_discount_outside_its_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        Critic(**{field: value})
