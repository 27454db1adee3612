"""A gain is said with its interval, and one that chance may explain says so."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from lightning.trainer.gains import MAY_BE_CHANCE, NOTHING_EARNED, gain_of, margin
from lightning.trainer.summary import Evaluation, evaluate_rollouts
from lightning.types import Rollout, Status, Task


def evaluation(step: int, rewards: list[float | None]) -> Evaluation:
    return evaluate_rollouts(
        step,
        [
            Rollout(
                str(place), "run", Task(place), "g", reward=reward, rewards={} if reward is None else {"twice": 2 * reward},
                status=Status.FAILED if reward is None else Status.SUCCEEDED,
            )
            for place, reward in enumerate(rewards)
        ],
    )  # fmt: skip


def zeros_and_ones(ones: int, of: int) -> list[float | None]:
    return [float(place < ones) for place in range(of)]


def test_a_gain_over_many_tasks_is_certain() -> None:
    gain = gain_of([evaluation(0, zeros_and_ones(72, 200)), evaluation(15, zeros_and_ones(175, 200))])
    assert gain is not None
    assert gain.is_certain
    assert str(gain) == "0.360 → 0.875, +0.515 [+0.43, +0.60] over 200 tasks"


def test_a_gain_over_few_tasks_may_be_chance() -> None:
    gain = gain_of([evaluation(0, zeros_and_ones(4, 12)), evaluation(8, zeros_and_ones(6, 12))])
    assert gain is not None
    assert not gain.is_certain
    assert str(gain).endswith(f"over 12 tasks; {MAY_BE_CHANCE}")


def test_what_is_not_known_has_no_interval_and_no_gain() -> None:
    one = gain_of([evaluation(0, [0.0]), evaluation(1, [1.0])])
    assert one is not None
    assert (one.interval, one.is_certain, "[unknown] over 1 task;" in str(one)) == (None, False, True)
    assert gain_of([evaluation(0, [0.0, 1.0])]) is None
    assert gain_of([evaluation(0, [0.0, 1.0]), evaluation(1, [None, None])]) is None
    assert margin(evaluation(0, [1.0])) is None


def test_failures_count_as_0_or_not_at_all() -> None:
    results = [evaluation(0, [0.5, 0.5, 0.25, None]), evaluation(1, [1.0, 1.0, 0.75, 1.0])]
    without, counted = gain_of(results), gain_of(results, with_failures=True)
    assert without is not None
    assert counted is not None
    assert (without.tasks, counted.tasks) == (3, 4)
    assert math.isclose(without.before, 1.25 / 3)
    assert math.isclose(counted.before, 1.25 / 4)


def test_a_named_part_has_its_own_spread() -> None:
    results = [evaluation(0, zeros_and_ones(3, 20)), evaluation(1, zeros_and_ones(15, 20))]
    reward, twice = gain_of(results), gain_of(results, "twice")
    assert reward is not None
    assert twice is not None
    assert reward.interval is not None
    assert twice.interval == pytest.approx(tuple(2 * end for end in reward.interval))


def test_a_part_that_only_some_rollouts_have_is_as_uncertain_as_these_are_few() -> None:
    few = [evaluation(step, zeros_and_ones(ones, 8)) for step, ones in enumerate((2, 5))]
    many = [evaluation(step, [*zeros_and_ones(ones, 8), *[0.0] * 100]) for step, ones in enumerate((2, 5))]
    parted = [replace(each, deviations=own.deviations, rewards=own.rewards, counts=own.counts)
              for each, own in zip(many, few, strict=True)]  # fmt: skip
    alone, beside = gain_of(few, "twice"), gain_of(parted, "twice")
    assert alone == beside
    assert beside is not None
    assert beside.tasks == 8
    assert evaluation(0, [1.0, None]).having("twice") == 1
    lost = replace(evaluation(5, [0.0, 1.0, None]), rewards={}, counts={}, deviations={})
    gain = gain_of([many[0], lost], "twice", with_failures=True)
    assert gain is not None
    assert (lost.having("twice"), gain.tasks) == (0, 1), "nothing but its failure counts where no rollout has the part"


def test_rewards_that_are_all_0_tell_nothing_of_their_spread() -> None:
    results = [evaluation(0, [0.0] * 20), evaluation(5, [0.0] * 19 + [None])]
    for with_failures in (False, True):
        gain = gain_of(results, with_failures=with_failures)
        assert gain is not None
        assert (gain.interval, gain.is_certain) == (None, False)
        assert str(gain).endswith(f"[unknown] over {20 if with_failures else 19} tasks; {NOTHING_EARNED}")
    assert margin(results[0]) is None
    some = gain_of([evaluation(0, [0.0] * 20), evaluation(5, zeros_and_ones(10, 20))])
    assert some is not None
    assert some.is_certain


@pytest.mark.parametrize("spreads", [(1.0, 1.0), (0.01, 1.0)])
def test_intervals_over_few_tasks_hold_the_truth_as_often_as_they_say(spreads: tuple[float, float]) -> None:
    draw, gains, means, tries = random.Random(1), 0, 0, 1_000
    for _ in range(tries):
        results = [evaluation(step, [draw.gauss(0, spread) for _ in range(4)]) for step, spread in enumerate(spreads)]
        gain, half = gain_of(results), margin(results[1])
        assert gain is not None
        assert gain.interval is not None
        assert half is not None
        gains += gain.interval[0] <= 0 <= gain.interval[1]
        means += abs(results[1].score) <= half
    assert 0.93 * tries <= gains <= 0.98 * tries
    assert 0.93 * tries <= means <= 0.98 * tries


def test_the_interval_has_the_true_gain_as_often_as_it_says() -> None:
    draw, held = random.Random(0), 0
    for _ in range(400):
        before, after = ([float(draw.random() < chance) for _ in range(30)] for chance in (0.3, 0.6))
        gain = gain_of([evaluation(0, [*before]), evaluation(1, [*after])])
        assert gain is not None
        assert gain.interval is not None
        held += gain.interval[0] <= 0.3 <= gain.interval[1]
    assert 0.92 * 400 <= held <= 0.98 * 400
