"""The estimates of a credit audit, on tasks whose advantages are known exactly, and on exact binomial probabilities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from lightning.testing import Action, ActionOutcome, Decision, DecisionTask
from lightning.testing.decisions import DecisionPath, bifurcation_tasks, walk
from lightning_debug.credit_estimates import (
    Executed,
    agreement,
    ceiling,
    executed,
    share_that_mattered,
    spearman,
    that_mattered,
    two_sided,
)

UNIT = (0.0, 1.0)


def audited(task: DecisionTask, n: int, rng: np.random.Generator, rollouts: int) -> list[tuple[Executed, float, bool]]:
    """Executed and true advantage of each call of rollouts, and whether the call was the last one. As in an audit, the recorded
    return stands in for the worth of the last answer, and nowhere else."""
    truth, found = task.truth(), []
    for _ in range(rollouts):
        path = walk(task, DecisionPath(), rng)
        for place, (state, action) in enumerate(zip(path.states, path.actions, strict=True)):
            last = place + 1 == len(path.states)

            def continued(calls: int, at: int, path: DecisionPath = path) -> list[float]:
                return [earned(walk(task, path.part(slice(calls)), rng, at)) for _ in range(n)]

            worth = earned(path) if last else continued(place + 1, path.states[place + 1])
            made = executed(continued(place, state), worth, UNIT)
            found.append((made, float(truth.advantages[state, action]), last))
    return found


def earned(path: DecisionPath) -> float:
    return float(sum(path.steps) + path.reward)


def sure() -> DecisionTask:
    """Two calls, the last of which ends the rollout with a reward that follows from its answer."""
    ends = tuple(Action(share, (ActionOutcome(reward=reward),)) for share, reward in ((0.6, 1.0), (0.4, 0.0)))
    worse = tuple(Action(share, (ActionOutcome(reward=reward),)) for share, reward in ((0.2, 1.0), (0.8, 0.0)))
    first = tuple(Action(0.5, (ActionOutcome(state=name),)) for name in ("good", "bad"))
    return DecisionTask("sure", {"choose": Decision(first), "good": Decision(ends), "bad": Decision(worse)})


@pytest.mark.parametrize("n", [4, 12])
def test_executed_advantages_are_unbiased_and_their_intervals_cover(n: int) -> None:
    tasks = [
        sure(),
        *(bifurcation_tasks()[name] for name in ("early", "late", "long-chain", "consult", "wasteful-tool")),
    ]
    for number, task in enumerate(tasks):
        found = audited(task, n, np.random.default_rng(number), 80)
        errors = np.array([made.advantage - true for made, true, _ in found])
        assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(len(errors)), task.name
        # A last reward that is luck is not the answer's worth: there the interval is of another number.
        told = [(made.interval, true) for made, true, last in found if not last or task.name == "sure"]
        inside = [interval is not None and interval[0] <= true <= interval[1] for interval, true in told]
        assert np.mean(inside) >= 0.95, task.name


@pytest.mark.parametrize("n", [4, 8, 16])
def test_the_interval_of_two_shares_covers_as_it_says(n: int) -> None:
    counts = range(n + 1)
    samples = [[1.0] * count + [0.0] * (n - count) for count in counts]
    made = {pair: executed(samples[pair[0]], samples[pair[1]], UNIT) for pair in itertools.product(counts, counts)}
    shares = np.linspace(0.0, 1.0, 11)
    chance = np.array([[math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in counts] for p in shares])
    every = []
    for (one, p), (other, q) in itertools.product(enumerate(shares), enumerate(shares)):
        covered = sum(
            chance[one, k] * chance[other, m]
            for (k, m), each in made.items()
            if each.interval is not None and each.interval[0] - 1e-12 <= q - p <= each.interval[1] + 1e-12
        )
        assert covered >= 0.94, (p, q)
        every.append(covered)
        if one == other:
            false = sum(
                chance[one, k] * chance[other, m]
                for (k, m), each in made.items()
                if each.p_value is not None and each.p_value <= 0.05
            )
            assert false <= 0.0505, p
    assert np.mean(every) > 0.95


def test_what_cannot_be_told_has_no_interval() -> None:
    assert executed([1.0], [0.0, 1.0], UNIT).interval is None
    assert executed([1.0, 1.0], [1.0, 1.0], (1.0, 1.0)).p_value is None
    alike = executed([0.0] * 8, [0.0] * 8, UNIT)
    assert alike.interval is not None
    assert alike.interval[0] < 0.0 < alike.interval[1], "equal returns are no proof"
    assert ceiling([alike]) is None
    assert ceiling([alike, alike]) is None
    assert share_that_mattered([], []) is None
    alone = share_that_mattered([True, False], ["one", "one"])
    assert alone is not None
    assert (alone.value, alone.interval) == (0.5, None)


def test_the_tails_are_students() -> None:
    for statistic, freedom, known in ((12.706, 1, 0.05), (2.306, 8, 0.05), (3.355, 8, 0.01), (1.96, 1e6, 0.05)):
        assert two_sided(statistic, freedom) == pytest.approx(known, rel=2e-3)
    assert two_sided(0.0, 5) == pytest.approx(1.0)


def test_many_comparisons_are_corrected() -> None:
    assert that_mattered([0.001, 0.02, 0.04, 0.9]) == [True, True, False, False]
    assert that_mattered([0.03, None, 0.04, 0.05]) == [True, False, True, True], (
        "each beside the others, unknown ones apart"
    )
    assert that_mattered([None]) == [False]


def test_agreement_is_measured_over_tasks() -> None:
    true = [0.5, -0.5, 0.0, 0.25, -0.25, 0.1]
    tasks = ["a", "a", "b", "b", "c", "c"]
    mattered = [True, True, False, False, False, False]
    same = agreement(true, true, mattered=mattered, last=[False] * 6, tasks=tasks)
    assert same.correlation.value == pytest.approx(1.0)
    assert same.correlation.interval == pytest.approx((1.0, 1.0))
    assert (same.rank.value, same.sign.value) == (pytest.approx(1.0), 1.0)
    upside_down = agreement([-value for value in true], true, mattered=mattered, last=[True] * 6, tasks=tasks)
    assert (upside_down.correlation.value, upside_down.sign.value) == (pytest.approx(-1.0), 0.0)
    assert upside_down.size.value == pytest.approx(1.0)
    assert upside_down.inner.value is None, "all calls were last ones"
    assert (same.better.value, same.better.interval) == (None, None)
    beside = agreement(true, true, mattered=mattered, last=[False] * 6, tasks=tasks, own=[-value for value in true])
    assert (beside.better.value, beside.better.interval) == (pytest.approx(2.0), pytest.approx((2.0, 2.0)))
    two = agreement(true[:4], true[:4], mattered=mattered[:4], last=[False] * 4, tasks=tasks[:4])
    assert (two.correlation.value, two.correlation.interval) == (pytest.approx(1.0), None), "two tasks have no spread"
    constant = agreement([1.0] * 6, true, mattered=[False] * 6, last=[False] * 6, tasks=["a"] * 6)
    assert (constant.correlation.value, constant.correlation.interval, constant.sign.value) == (None, None, None)
    assert spearman(np.array([1.0, 2.0, 2.0, 9.0]), np.array([1.0, 5.0, 5.0, 6.0])) == pytest.approx(1.0)
