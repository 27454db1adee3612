"""Group baselines, by hand and by their properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.credit import all_equal, centre, grpo, rloo

finite = st.floats(-1e3, 1e3, allow_nan=False)
groups = st.lists(finite, min_size=2, max_size=8).map(np.array)


def test_grpo_by_hand() -> None:
    deviation = np.sqrt(1 / 3)  # of [1, 0, 0, 1], with G - 1
    np.testing.assert_allclose(grpo(np.array([1.0, 0, 0, 1])), np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-4))


def test_dr_grpo_by_hand() -> None:
    np.testing.assert_allclose(centre(np.array([1.0, 0, 0, 1])), [0.5, -0.5, -0.5, 0.5])


def test_rloo_by_hand() -> None:
    np.testing.assert_allclose(rloo(np.array([1.0, 0, 0.5])), [1 - 0.25, -0.75, 0.0])


def test_rewards_that_bfloat16_would_tie_are_not_tied() -> None:
    high, low = grpo(np.array([1.0, 0.999]))
    assert high == pytest.approx(-low)
    assert high == pytest.approx(0.0005 / (0.001 / np.sqrt(2) + 1e-4), rel=1e-9)
    assert not all_equal(np.array([1.0, 0.999]))


@pytest.mark.parametrize("estimator", [grpo, centre, rloo])
@pytest.mark.parametrize("returns", [[0.3] * 4, [0.1 + 0.2, 0.3], [0.0, 0.0], [1e6] * 3, [-1e-9] * 2, [0.7]])
def test_equal_returns_teach_nothing(estimator, returns) -> None:  # type: ignore[no-untyped-def]
    assert estimator(np.array(returns)).tolist() == [0.0] * len(returns)


@pytest.mark.parametrize("returns", [[0.3] * 4, [0.0, 0.0], [0.7]])
def test_equal_returns_teach_nothing_without_an_epsilon_either(returns: list[float]) -> None:
    assert grpo(np.array(returns), eps=0.0).tolist() == [0.0] * len(returns)


@given(groups)
def test_rloo_is_each_return_minus_the_mean_of_the_others(returns: np.ndarray) -> None:
    others = [returns[i] - np.delete(returns, i).mean() for i in range(len(returns))]
    np.testing.assert_allclose(rloo(returns), others, atol=1e-9)


@given(groups)
def test_advantages_sum_to_zero_and_keep_the_order(returns: np.ndarray) -> None:
    for estimator in (grpo, centre, rloo):
        values = estimator(returns)
        assert values.dtype == np.float64
        assert abs(values.sum()) <= 1e-9 * max(1.0, np.abs(returns).max())
        for i in range(len(returns)):
            for j in range(len(returns)):
                assert returns[i] <= returns[j] or values[i] >= values[j]


@given(groups, st.floats(-10, 10))
def test_a_constant_added_to_every_reward_changes_nothing(returns: np.ndarray, shift: float) -> None:
    np.testing.assert_allclose(centre(returns + shift), centre(returns), atol=1e-9)
