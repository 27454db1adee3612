"""Intervals cover what they say, and the sequential test keeps its level however often it is looked at."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from lightning_debug import statistics
from lightning_debug.statistics import SequentialTest, avg_at_k, ks_of, p_flipped, p_regrouped, pass_at_k

REWARDS = some.lists(some.lists(some.floats(0.0, 1.0), min_size=1, max_size=6), min_size=1, max_size=12)


@given(REWARDS)
def test_an_interval_is_within_the_bounds_has_a_width_and_holds_the_mean(rewards: list[list[float]]) -> None:
    found = avg_at_k(rewards)
    assert found is not None
    assert found.interval is not None
    low, high = found.interval
    assert found.value == pytest.approx(np.mean([np.mean(task) for task in rewards]))
    assert 0.0 <= low <= found.value + 1e-9
    assert found.value - 1e-9 <= high <= 1.0
    assert high - low > 0.001
    assert avg_at_k([[3.0 * each - 1.0 for each in task] for task in rewards], (-1.0, 2.0)).interval == pytest.approx(  # type: ignore[union-attr]
        (3.0 * low - 1.0, 3.0 * high - 1.0), abs=1e-6
    )


@pytest.mark.parametrize(
    ("share", "of_those", "of_others", "tasks", "n"),
    [(0.05, 0.9, 0.02, 20, 8), (0.95, 0.98, 0.1, 20, 8), (0.05, 0.9, 0.02, 60, 8), (0.1, 1.0, 0.3, 20, 64)],
)
def test_intervals_cover_where_a_few_tasks_are_unlike_the_others(
    share: float, of_those: float, of_others: float, tasks: int, n: int
) -> None:
    """Often none of the few is among the tasks, whose rewards are then nearly all alike."""
    rng, covered, count = np.random.default_rng(3), 0, 400
    mean = share * of_those + (1 - share) * of_others
    for _ in range(count):
        rates = np.where(rng.random((tasks, 1)) < share, of_those, of_others)
        found = avg_at_k((rng.random((tasks, n)) < rates).astype(float).tolist())
        assert found is not None
        assert found.interval is not None
        covered += found.interval[0] <= mean <= found.interval[1]
    assert covered / count > 0.94


def test_a_mean_that_is_beyond_a_bound_by_rounding_is_within_it() -> None:
    found = avg_at_k([[0.1] * 3, [0.1] * 3], (0.0, 0.1))
    assert found is not None
    assert found.interval is not None
    assert found.interval[1] == pytest.approx(0.1)


def test_what_was_decided_stays_so_whatever_comes_later() -> None:
    test = SequentialTest(-1.0, 1.0)
    test.add([1.0] * 10 + [-1.0] * 30)
    assert (test.mean < 0.0, test.decided) == (True, 1)


@pytest.mark.parametrize(("mean", "concentration"), [(0.1, 3.0), (0.5, 1e6), (0.5, 1.0), (0.9, 3.0)])
@pytest.mark.parametrize(("tasks", "n", "graded"), [(12, 1, False), (30, 4, False), (30, 4, True)])
def test_intervals_cover_where_rollouts_of_a_task_are_alike(
    mean: float, concentration: float, tasks: int, n: int, graded: bool
) -> None:
    """A task's own success rate is drawn from a beta distribution, so that its rollouts are not independent."""
    rng, covered, count = np.random.default_rng(7), 0, 200
    for _ in range(count):
        rates = rng.beta(mean * concentration, (1 - mean) * concentration, (tasks, 1))
        rewards = (
            rng.beta(2 * rates + 1e-3, 2 - 2 * rates + 1e-3, (tasks, n)) if graded else rng.random((tasks, n)) < rates
        )
        found = avg_at_k(rewards.astype(float).tolist())
        assert found is not None
        assert found.interval is not None
        covered += found.interval[0] <= mean <= found.interval[1]
    assert covered / count > 0.9, "95 % but for what chance makes of 200"


def test_an_interval_that_takes_rollouts_for_independent_would_be_too_narrow() -> None:
    """Each task is always solved or never: eight rollouts of it say what one does."""
    alike = avg_at_k([[float(number % 2)] * 8 for number in range(20)])
    once = avg_at_k([[float(number % 2)] for number in range(20)])
    assert alike is not None
    assert once is not None
    assert alike.interval == pytest.approx(once.interval)


@given(some.lists(some.booleans(), min_size=1, max_size=9), some.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(results: list[bool], data: some.DataObject) -> None:
    k = data.draw(some.integers(1, len(results)))
    subsets = list(itertools.combinations(results, k))
    found = pass_at_k([(sum(results), len(results))], k)
    assert found is not None
    assert found.value == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_a_task_with_fewer_rollouts_than_k_is_left_out_and_counted() -> None:
    found = pass_at_k([(1, 4), (0, 1), (0, 4)], 2)
    assert found is not None
    assert (found.tasks, found.value) == (2, 0.25)
    assert pass_at_k([(1, 1)], 2) is None
    assert avg_at_k([[], []]) is None
    assert ks_of(8) == [1, 2, 4, 8]
    assert ks_of(6) == [1, 2, 4, 6]


def test_rewards_outside_the_bounds_have_no_interval() -> None:
    found = avg_at_k([[0.0], [2.0]])
    assert found is not None
    assert (found.value, found.interval) == (1.0, None)


@pytest.mark.parametrize("kind", ["even", "seldom", "graded", "per task"])
def test_false_alarms_are_at_most_five_in_a_hundred_under_a_look_at_every_batch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "CANDIDATES", 3)
    rng, alarms, count = np.random.default_rng(11), 0, 120

    def rewards(size: int) -> np.ndarray:
        if kind == "graded":
            return rng.beta(0.6, 0.9, size)
        if kind == "per task":
            return rng.binomial(4, 0.5, size) / 4
        return (rng.random(size) < (0.5 if kind == "even" else 0.04)).astype(float)

    for _ in range(count):
        test = SequentialTest(-1.0, 1.0)
        while test.count < 80 and not test.decided:
            test.add((rewards(4) - rewards(4)).tolist())
        alarms += test.decided != 0
    assert alarms / count <= 0.05


@pytest.mark.parametrize("difference", [0.0, 0.3])
def test_the_true_difference_stays_in_the_interval_at_every_look(difference: float) -> None:
    rng, left, count = np.random.default_rng(5), 0, 60
    for _ in range(count):
        test, inside = SequentialTest(-1.0, 1.0), True
        for _ in range(10):
            other = rng.random(5) < 0.4
            test.add(((rng.random(5) < 0.4 + difference).astype(float) - other).tolist())
            low, high = test.interval
            inside = inside and low <= difference <= high
        left += not inside
    assert left / count <= 0.05


@settings(max_examples=25)
@given(some.lists(some.floats(-1.0, 1.0), min_size=1, max_size=25), some.integers(0, 25))
def test_it_does_not_matter_how_differences_are_cut_into_batches(differences: list[float], cut: int) -> None:
    once, twice = SequentialTest(-1.0, 1.0), SequentialTest(-1.0, 1.0)
    once.add(differences)
    twice.add(differences[:cut])
    before = twice.interval
    twice.add(differences[cut:])
    assert once.interval == twice.interval
    assert once.p_value == pytest.approx(twice.p_value)
    assert before[0] <= twice.interval[0] or math.isclose(*twice.interval)
    assert (once.decided != 0) == (not once.interval[0] < 0.0 < once.interval[1])
    mirrored = SequentialTest(-1.0, 1.0)
    mirrored.add([-each for each in differences])
    assert mirrored.p_value == pytest.approx(once.p_value)
    assert mirrored.interval == pytest.approx((-once.interval[1], -once.interval[0]), abs=1e-6)


def test_a_difference_that_always_shows_is_found_soon_and_its_direction_told() -> None:
    for sign in (1, -1):
        test = SequentialTest(-1.0, 1.0)
        while not test.decided:
            test.add([sign * 1.0])
        assert test.decided == sign
        assert test.count <= 8
    with pytest.raises(ValueError, match="outside"):
        test.add([1.5])


# permutation tests -------------------------------------------------------------------------------------------------------
def test_a_permutation_test_counts_the_deals_that_differ_as_much() -> None:
    assert p_regrouped([0.0, 0.0], [1.0, 1.0]) == pytest.approx(2 / 6)
    assert p_regrouped([0.5, 0.5], [0.5, 0.5]) == 1.0
    assert p_flipped([1.0, 1.0, 1.0]) == pytest.approx(2 / 8)
    with pytest.raises(ValueError, match="both sides"):
        p_regrouped([], [1.0])
    with pytest.raises(ValueError, match="needs a difference"):
        p_flipped([])


@pytest.mark.parametrize("size", [6, 30])
def test_equal_groups_differ_by_chance_as_often_as_the_p_value_says(size: int) -> None:
    """Of two draws from one distribution a twentieth is below 0.05, whether all deals are counted or some are drawn."""
    rng = np.random.default_rng(5)
    draws = [rng.beta(0.5, 0.5, (2, size)).tolist() for _ in range(60)]
    regrouped = [p_regrouped(one, other) for one, other in draws]
    flipped = [p_flipped([a - b for a, b in zip(one, other, strict=True)]) for one, other in draws]
    for found in (regrouped, flipped):
        assert sum(p <= 0.05 for p in found) <= 9
        assert 0.3 < np.mean(found) < 0.7
