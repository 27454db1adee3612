"""Selections stay within their budget, decide the same way twice, and find the best."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning_prompts.selection import Draw, Method, Scores, Selection

METHODS: tuple[Method, ...] = ("ucb", "successive_rejects")


def play(selection: Selection, earns: dict[int, float], noise: float = 0.0, seed: int = 0) -> list[Draw]:
    rng = random.Random(seed)
    made = []
    for draw in selection.draws():
        made.append(draw)
        for version in draw.versions:
            selection.scores.add(version, [earns[version] + noise * rng.gauss(0, 1) for _ in range(draw.tasks)], 0)
    return made


ARMS = st.dictionaries(st.integers(1, 99), st.floats(-10, 10), min_size=1, max_size=9)


@given(
    earns=ARMS,
    method=st.sampled_from(METHODS),
    keep=st.integers(1, 5),
    budget=st.integers(1, 120),
    minibatch=st.integers(1, 9),
    exploration=st.floats(0, 3),
    seed=st.integers(0, 9),
)
def test_the_budget_holds_and_the_choice_is_of_the_arms(
    earns: dict[int, float], method: Method, keep: int, budget: int, minibatch: int, exploration: float, seed: int
) -> None:
    arms = list(earns)

    def once() -> tuple[list[Draw], list[int]]:
        selection = Selection(method, Scores(), arms, keep, budget, minibatch, exploration)
        return play(selection, earns, 0.5, seed), selection.best()

    draws, best = once()
    assert sum(len(draw.versions) * draw.tasks for draw in draws) <= budget
    assert all(len(set(draw.versions)) == len(draw.versions) and draw.tasks > 0 for draw in draws)
    assert len(best) == min(keep, len(arms))
    assert set(best) <= set(arms)
    assert len(set(best)) == len(best)
    assert once() == (draws, best)
    if len(arms) <= keep:
        assert not draws


@given(
    earns=ARMS.filter(lambda arms: len(set(arms.values())) == len(arms)),
    method=st.sampled_from(METHODS),
    keep=st.integers(1, 3),
)
def test_without_noise_the_best_are_found_in_their_order(earns: dict[int, float], method: Method, keep: int) -> None:
    selection = Selection(method, Scores(), list(earns), keep, 20 * len(earns), 1, 1.0)
    play(selection, earns)
    if len(earns) > keep:
        assert selection.best() == sorted(earns, key=lambda version: -earns[version])[:keep]


@pytest.mark.parametrize("method", METHODS)
def test_with_noise_the_best_is_found_more_often_than_by_sharing_the_budget_evenly(method: Method) -> None:
    earns = {version: version / 10 for version in range(1, 9)}
    found = even = 0
    for seed in range(40):
        selection = Selection(method, Scores(), list(earns), 1, 160, 2, 0.3)
        play(selection, earns, 0.4, seed)
        found += selection.best() == [8]
        rng = random.Random(1000 + seed)
        means = {version: sum(value + 0.4 * rng.gauss(0, 1) for _ in range(20)) for version, value in earns.items()}
        even += max(means, key=means.__getitem__) == 8
    assert found > even, (found, even)


def test_ucb_draws_several_at_once_and_the_unknown_first() -> None:
    scores = Scores()
    scores.add(1, [1.0, 1.0], 0)
    selection = Selection("ucb", scores, [1, 2, 3], 2, 12, 3, 0.0)
    draws = play(selection, {1: 1.0, 2: 0.0, 3: 0.5})
    assert draws == [Draw((2, 3), 3), Draw((1, 3), 3)]
    assert selection.best() == [1, 3]


def test_successive_rejects_has_the_phases_of_the_paper() -> None:
    selection = Selection("successive_rejects", Scores(), [1, 2, 3, 4], 1, 40, 1, 1.0)
    draws = play(selection, {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})
    # log(4) = 1/2 + 1/2 + 1/3 + 1/4 = 19/12; n_k = ceil(36 / (19/12 (5 - k))) = 6, 8, 12
    assert draws == [Draw((1, 2, 3, 4), 6), Draw((1, 2, 3), 2), Draw((1, 2), 4)]


def test_a_failure_counts_as_the_worst_that_was_seen_and_is_no_reward() -> None:
    scores = Scores()
    scores.add(1, [-1.0, 1.0], 0)
    scores.add(2, [1.0], 3)
    scores.add(3, [], 2)
    assert (scores.value(1), scores.value(2), scores.value(3), scores.value(4)) == (0.0, -0.5, -1.0, None)
    assert scores.ranked([4, 3, 2, 1]) == [1, 2, 3, 4]
    assert scores.rewards[2] == [1.0]


def test_of_equals_the_first_wins() -> None:
    scores = Scores()
    for version in (5, 3, 4):
        scores.add(version, [0.5], 0)
    assert scores.ranked([3, 4, 5]) == [3, 4, 5]
    assert scores.ranked([5, 4, 3]) == [5, 4, 3]
