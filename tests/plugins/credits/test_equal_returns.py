"""Groups whose rollouts all earned the same: skipped, unless the credit function tells their calls apart."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.algorithms import from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import Credit, Decayed, Discounted, GroupAdvantage, group_returns, grpo, identical, per_agent
from lightning.errors import DataError
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.trainer.training_data import batch_digest
from lightning.types import StepReward
from lightning_credits import GiGPO, Intermediate, LeaveOneOut

CALLS = [((1, 2), (3,)), ((7, 8), (9,)), ((7, 8), (4,))]
COMPARING = [name for name, preset in PRESETS.items() if preset.estimator != "none"]


def member(index: int, steps: list[list[float]], *, reward: float = 1.0, group: str = "g") -> Trajectory:
    """A rollout with the step rewards of each of its calls."""
    made = make_trajectory(CALLS[: len(steps)], rollout=f"{group}/{index}", group=group, index=index, reward=reward)
    return replace(
        made,
        step_rewards=tuple(
            StepReward(value, "r", f"{group}/{index}/{call}") for call, own in enumerate(steps) for value in own
        ),
    )


def group(*steps: list[list[float]], reward: float = 1.0) -> Group:
    return Group("g", tuple(member(index, own, reward=reward) for index, own in enumerate(steps)))


def by_place(group, advantage):
    """Process rewards: early calls are worse than late ones, whatever the rollout earned."""
    return [np.arange(len(member.transitions)) - 0.5 for member in group.trajectories]


def trained(rows: tuple[Sample, ...]) -> dict[tuple[str, int], float]:
    return {(span.rollout, span.seq): float(row.advantages[span.start]) for row in rows for span in row.spans}


EARLY_OR_LATE = group([[1.0], [-1.0]], [[-1.0], [1.0]], [[], []], [[], []])


@pytest.mark.parametrize("credit", [Intermediate(), LeaveOneOut(), GiGPO(), Discounted(), by_place])
def test_credit_on_single_calls_is_asked_where_returns_are_equal(credit: Credit) -> None:
    algorithm = LightningRL("grpo", group_size=4, credit=credit)
    batch = algorithm.batch([EARLY_OR_LATE, group([[]], [[]])] if credit is not by_place else [EARLY_OR_LATE])
    found = trained(batch.samples)
    members = zip(EARLY_OR_LATE.trajectories, credit(EARLY_OR_LATE, lambda returns: grpo(returns)), strict=True)
    expected = {(own.rollout.id, call): value for own, values in members for call, value in enumerate(values) if value}
    assert expected
    assert found == pytest.approx(expected)
    assert batch.skipped == ({} if credit is by_place else {"all_rewards_equal": 1})
    assert algorithm.teaches(EARLY_OR_LATE)


def test_rollouts_of_different_lengths_differ_by_a_discount() -> None:
    lengths = group([[]], [[], []], reward=1.0)
    for credit in (GiGPO(gamma=0.5), Discounted(0.5)):
        assert LightningRL(credit=credit).batch([lengths]).samples
        assert not LightningRL("dapo", credit=credit).teaches(lengths), "it is trained, but no task is sampled for it"
    failed = group([[]], [[], []], reward=0.0)
    assert LightningRL(credit=GiGPO()).batch([failed]).skipped == {"all_rewards_equal": 1}


@pytest.mark.parametrize("low_level", COMPARING)
@pytest.mark.parametrize("credit", [identical, Decayed(), per_agent])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -1e9])
def test_credit_by_outcome_skips_equal_rewards(low_level: LowLevel, credit: Credit, reward: float) -> None:
    equal = [group([[0.1, 0.2], [0.3]], [[0.3], [0.2, 0.1]], [[0.2], [0.3], [0.1]], reward=reward)]
    algorithm = LightningRL(low_level, credit=credit, advantage_eps=0.0)
    assert (algorithm.batch(equal).samples, algorithm.batch(equal).skipped) == ((), {"all_rewards_equal": 1})
    assert not algorithm.teaches(equal[0])


@pytest.mark.parametrize("low_level", COMPARING)
@pytest.mark.parametrize("credit", [identical, Decayed(), per_agent])
def test_equal_returns_change_nothing_for_others(low_level: LowLevel, credit: Credit) -> None:
    """Numbers by outcome are those that they were when such groups were skipped unasked."""
    mixed = make_group([1.0, 0.1, 0.0], group="mixed", calls=CALLS)
    algorithm = LightningRL(low_level, credit=credit)
    assert batch_digest(algorithm.batch([make_group([0.1] * 3), mixed])) == batch_digest(algorithm.batch([mixed]))


ROUNDING = [
    # the mean of three 0.1 is 0.10000000000000002
    (Intermediate(), group([[0.1]], [[0.1]], [[0.1]])),
    (LeaveOneOut(prior=0.0), group([[0.1], [0.2]], [[0.1], [0.2]], [[0.1], [0.2]], reward=0.1)),
    # what is left to earn from the second call on is 5.6e-17 in one rollout and 0 in the other: divided by its deviation, 0.7
    (Discounted(1.0), group([[1.0], [0.1, 0.2, -0.3]], [[1.0], []], reward=0.0)),
    (GiGPO(gamma=1.0), group([[1.0], [0.1, 0.2, -0.3]], [[1.0], []], reward=0.0)),
    # one's own: 1e-17 is rounding, whatever its unit, and 0 / 0 is what a deviation makes of equal rewards
    (lambda group, advantage: [np.full(1, value) for value in (1e-17, -1e-17)], group([[]], [[]], reward=0.0)),
    (lambda group, advantage: [np.full(1, value) for value in (1e-4, -1e-4)], group([[]], [[]], reward=1e9)),
    (lambda group, advantage: list((group_returns(group) - 1.0)[:, None] / np.zeros(1)), group([[]], [[]])),
]


@pytest.mark.parametrize(("credit", "equal"), ROUNDING)
def test_rounding_tells_nothing_apart(credit: Credit, equal: Group, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = LightningRL("grpo", credit=credit, advantage_eps=0.0)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        batch = algorithm.batch([equal])
        assert not algorithm.teaches(equal)
    assert (batch.samples, batch.skipped) == ((), {"all_rewards_equal": 1})
    assert not caplog.records


def test_a_deviation_of_zero_in_plain_python_ends_no_run() -> None:
    def normalized(group: Group, advantage: GroupAdvantage) -> list[np.ndarray]:
        rewards = [member.reward for member in group.trajectories]
        mean = sum(rewards) / len(rewards)
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        return [np.full(len(own.transitions), (own.reward - mean) / deviation) for own in group.trajectories]

    batch = LightningRL(credit=normalized).batch([make_group([1.0, 1.0], group="solved"), make_group([1.0, 0.0])])
    assert (len(batch.used), batch.skipped) == (2, {"all_rewards_equal": 1})


def test_an_advantage_that_overflows_is_named_where_returns_are_equal_too() -> None:
    algorithm = LightningRL(credit=lambda group, advantage: [np.full(1, np.inf), np.zeros(1)])
    assert algorithm.batch([group([[]], [[]])]).skipped == {"advantage_not_finite": 1}


def test_only_trained_calls_tell_a_group_apart() -> None:
    others = tuple(replace(own, trainable=(False, True)) for own in group([[], []], [[], []]).trajectories)

    def first_only(group, advantage):
        return [np.array([float(own.rollout.index), 0.0]) for own in group.trajectories]

    assert LightningRL(credit=first_only).batch([Group("g", others)]).skipped == {"all_rewards_equal": 1}
    silent = tuple(replace(own, trainable=(False, False)) for own in others)
    assert LightningRL(credit=by_place).batch([Group("g", silent)]).skipped == {"all_rewards_equal": 1}


def test_a_loss_of_ones_own_is_shown_the_same_groups() -> None:
    """As an entropy bonus or a KL penalty is; calls with the advantage 0 have rows."""

    @from_loss
    def plain(tokens):
        return -tokens.advantages * tokens.logprobs

    equal = plain().batch([make_group([1.0, 1.0])])
    assert (equal.skipped, [row.advantages[-1] for row in equal.samples]) == ({"all_rewards_equal": 1}, [0.0, 0.0])
    batch = plain(credit=Intermediate()).batch([group([[0.25], [-0.25]], [[], []])])
    assert trained(batch.samples) == {("g/0", 0): 0.25, ("g/0", 1): -0.25, ("g/1", 0): 0.0, ("g/1", 1): 0.0}
    assert not plain("dapo").teaches(make_group([1.0, 1.0]))


@pytest.mark.parametrize("term", ["entropy_coefficient", "kl_coefficient"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "ppo"])
def test_rows_are_kept_where_a_term_needs_them(name: LowLevel, term: str) -> None:
    """A KL penalty and an entropy bonus do not look at rewards. The equal group is in no normalisation of the others."""
    equal = Group("e", tuple(member(index, [[]], group="e") for index in range(2)))
    mixed = make_group([1.0, 0.0])
    plain, kept = LightningRL(name), LightningRL(name, dynamic_sampling=False, **{term: 0.1})  # type: ignore[arg-type]
    alone = kept.batch([equal])
    assert [row.advantages[-1] for row in alone.samples] == [0.0, 0.0]
    assert alone.skipped == {"all_rewards_equal": 1}
    assert plain.batch([equal]).samples == ()
    assert not kept.teaches(equal) or name == "reinforce++"
    found = kept.batch([equal, mixed])
    assert [row.spans[0].rollout for row in found.samples] == ["e/0", "e/1", "group-0/0", "group-0/1"]
    if name != "reinforce++":  # which compares over the step
        own = [row.advantages[-1] for row in plain.batch([mixed]).samples]
        assert [row.advantages[-1] for row in found.samples] == [0.0, 0.0, *own]
    asked = replace(kept, dynamic_sampling=True)
    assert asked.batch([equal]).samples == () or name == "reinforce++", "such groups were replaced by others"


def test_dynamic_sampling_does_not_count_what_differs_in_length_alone() -> None:
    """DAPO's equation 11 is on right and wrong answers, in a batch as for dynamic sampling."""
    short = make_trajectory([((1,), (2, 3))], rollout="g/0", reward=0.0)
    long = make_trajectory([((1,), tuple(range(2, 12)))], rollout="g/1", reward=0.0)
    algorithm = LightningRL("dapo", group_size=2, overlong_tokens=10, overlong_buffer=4)
    wrong = Group("g", (short, long))
    assert not algorithm.teaches(wrong)
    assert algorithm.batch([wrong]).skipped == {"all_rewards_equal": 1}
    right = replace(short, rollout=replace(short.rollout, reward=1.0))
    assert algorithm.teaches(Group("g", (right, long)))
    made_equal = replace(long, rollout=replace(long.rollout, reward=1.0))
    assert not algorithm.teaches(Group("g", (short, made_equal)))  # 1 - 1 = 0: the batch would skip it


WRONG = [
    (lambda group, advantage: advantage(group_returns(group)), r"numbers of the shapes \[\(\), \(\), \(\)\]"),
    (lambda group, advantage: [np.ones(2)] * 2, r"numbers of the shapes \[\(2,\), \(2,\)\]"),
    (lambda group, advantage: [np.ones(3)] * 3, r"numbers of the shapes \[\(3,\), \(3,\), \(3,\)\]"),
    (lambda group, advantage: [np.ones((1, 2))] * 3, r"numbers of the shapes \[\(1, 2\), \(1, 2\), \(1, 2\)\]"),
    (lambda group, advantage: None, r"None \('NoneType' object is not iterable\)"),
    (lambda group, advantage: [None, "much", "little"], r"\[None, 'much', 'little'\] \(could not convert .*\)"),
    (
        lambda group, advantage: [torch.ones(2, requires_grad=True)] * 3,
        r"\[tensor\(\[1., 1.\], requires_grad=True\).*\(Can't call numpy\(\) on Tensor that requires grad.*\)",
    ),
]


@pytest.mark.parametrize(("credit", "found"), WRONG)
@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.5], [1.0, 1.0, 1.0]])
def test_credit_that_is_not_one_number_for_each_call_is_refused_by_name(
    credit: Credit, found: str, rewards: list[float]
) -> None:
    algorithm = LightningRL(credit=credit)
    message = (
        rf"the credit function <lambda> gave {found} for group odd, whose rollouts have \[2, 2, 2\] calls: credit must give "
        "one advantage for each call, in one array for each rollout"
    )
    with pytest.raises(DataError, match=message):
        algorithm.batch([make_group(rewards, group="odd", calls=CALLS[:2])])


def test_advantages_never_move_into_another_group() -> None:
    """Two lists for three rollouts, then four: together they fit."""
    lists = {"a": 2, "b": 4}

    def shifted(group, advantage):
        return [np.ones(2)] * lists[group.id]

    groups = [make_group([0.0, 1.0, 0.5], group=name, calls=CALLS[:2]) for name in "ab"]
    with pytest.raises(DataError, match=r"the credit function .*shifted gave .* for group a"):
        LightningRL(credit=shifted).batch(groups)


def test_plain_lists_of_numbers_are_welcome() -> None:
    batch = LightningRL(credit=lambda group, advantage: [[1, 2], [3, 4]]).batch(
        [make_group([0.0, 1.0], calls=CALLS[:2])]
    )
    assert list(trained(batch.samples).values()) == [1.0, 2.0, 3.0, 4.0]


def test_value_targets_are_counted_too() -> None:
    class Short:
        head = "critic"

        def __call__(self, group, advantage):
            return [np.ones(len(own.transitions)) for own in group.trajectories]

        def value_targets(self, trajectory):
            return np.ones(1)

    with pytest.raises(DataError, match=r"value_targets\) gave .* credit must give one value target for each call"):
        LightningRL(credit=Short()).batch([make_group([0.0, 1.0], calls=CALLS[:2])])
