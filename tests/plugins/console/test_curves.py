"""Curves are thinned, put together and summed up without a number that nobody measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.trainer.summary import Evaluation
from lightning_console.pages.words import count, number, seconds, share, written
from lightning_console.queries.curves import Curves, gain_of, mean_and_spread
from lightning_console.queries.runs import About, points_of, thinned

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=300)
ABOUT = About("m", "grpo", 0, "x", 1, 1)


@given(VALUES, st.integers(1, 50))
def test_a_thinned_curve_keeps_the_least_and_the_most_of_each_stretch(values: list[float | None], most: int) -> None:
    xs = [float(place) for place in range(len(values))]
    points, places = points_of(xs, values, most)
    assert len(points) == len(places) == min(len(values), max(most, 0))
    assert [point[0] for point in points] == sorted(xs[place] for place in places)
    known = [value for value in values if value is not None]
    lows = [low for point in points if (low := point[2] if len(point) > 2 else point[1]) is not None]
    highs = [high for point in points if (high := point[3] if len(point) > 3 else point[1]) is not None]
    assert (min(lows, default=None), max(highs, default=None)) == (min(known, default=None), max(known, default=None))


@given(st.lists(st.floats(0, 1), max_size=300), st.integers(1, 60))
def test_a_small_curve_has_the_mean_of_the_large_one(values: list[float], most: int) -> None:
    found = thinned(values, most)
    assert len(found) == min(len(values), most)
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in found)


def test_curves_of_seeds_are_put_together_where_all_of_them_are() -> None:
    points = mean_and_spread([([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]), ([1.0, 2.0, 3.0], [3.0, None, 5.0])])
    assert points == [[1.0, 2.0, 1.0, 3.0], [2.0, 3.0, 2.0, 4.0]]
    assert mean_and_spread([([0.0], [None]), ([5.0], [None])]) == []
    assert mean_and_spread([([0.0], [1.0]), ([5.0], [1.0])]) == [], "they have no step in common"


def made(rewards: list[float], evaluations: tuple[Evaluation, ...] = ()) -> Curves:
    steps = tuple(range(1, len(rewards) + 1))
    values = tuple({"reward_with_failures": reward} for reward in rewards)
    seconds = tuple(10.0 * step for step in steps)
    return Curves(ABOUT, steps, values, seconds, seconds, evaluations, (), {}, {})


def test_when_most_of_the_gain_was_there() -> None:
    found = gain_of(made([0.0] * 5 + [1.0] * 15))
    assert found is not None
    assert (found.before, found.after, found.steps, found.seconds) == (0.0, 1.0, 9, 90.0)
    results = tuple(
        Evaluation(step, reward, 10, 0) for step, reward in ((0, 0.1), (2, 0.2), (4, 0.9), (6, 1.0), (8, 0.95), (9, 1))
    )
    measured = gain_of(made([0.0] * 10, results))
    assert measured is not None
    assert (measured.steps, measured.measure) == (4, "held-out")
    assert gain_of(made([1.0] * 5 + [0.0] * 15)) is None, "it only got worse"
    assert gain_of(made([0.0, 1.0])) is None, "two steps say nothing"


def test_numbers_are_said_short_and_whole() -> None:
    assert [number(value) for value in (None, 0.0, 0.5, 1e-7, -1e-7, math.nan)] == [
        "–",
        "0.000",
        "0.500",
        "1.0e-07",
        "-1.0e-07",
        "nan",
    ]
    assert [share(value) for value in (None, 0.0, 0.034, 0.5, 1.0)] == ["–", "0.0 %", "3.4 %", "50 %", "100 %"]
    assert [count(value) for value in (None, 7, 1234567)] == ["–", "7", "1 234 567"]
    assert [seconds(value) for value in (None, 4.25, 100, 130, 8000, 4e6)] == [
        "–",
        "4.2 s",
        "100 s",
        "2.2 min",
        "2.2 h",
        "46 days",
    ]
    assert written({"a": "\n  b"}) == '{"a": "\\n b"}'
    assert len(written("x" * 500)) == 160


@pytest.mark.parametrize("value", ["<b>", "'", "\u202e"])
def test_what_a_user_wrote_stays_text(value: str) -> None:
    assert written(value) == value
