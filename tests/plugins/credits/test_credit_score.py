"""The score of a credit: facts that hold whatever the numbers are, and the definitions of the metrics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from lightning.batch.trajectory import Group
from lightning.credit import Credit, GroupAdvantage, centre, identical, per_agent, rloo
from lightning.errors import ConfigError, DataError
from lightning.testing.decisions import (
    Action,
    ActionOutcome,
    Decision,
    DecisionTask,
    bifurcation_tasks,
    consult,
    early,
    late,
    late_bill,
    recombining,
    score_credit,
    score_credits,
    wasteful_tool,
)
from lightning_credits import Critic, GiGPO, Intermediate, LeaveOneOut


def certain() -> DecisionTask:
    """Two decisions, and no luck anywhere."""
    return DecisionTask(
        "certain",
        {
            "first": Decision(tuple(Action(0.5, (ActionOutcome(1.0, name),)) for name in ("up", "down"))),
            "up": Decision(tuple(Action(0.5, (ActionOutcome(reward=reward),)) for reward in (1.0, 0.5))),
            "down": Decision(tuple(Action(0.5, (ActionOutcome(reward=reward),)) for reward in (0.4, 0.2))),
        },
    )


def scaled(credit: Credit, by: float) -> Credit:
    def credit_times(group: Group, advantage: GroupAdvantage) -> list[np.ndarray]:
        return [by * part for part in credit(group, advantage)]

    return credit_times


def nothing(group: Group, advantage: GroupAdvantage) -> list[np.ndarray]:
    return [np.zeros(len(member.transitions)) for member in group.trajectories]


def test_a_credit_by_token_is_scored_by_its_mean() -> None:
    def by_token(group: Group, advantage: GroupAdvantage) -> list[list[np.ndarray]]:
        spread = [
            [np.linspace(-1.0, 1.0, len(call.response_ids)) for call in one.transitions] for one in group.trajectories
        ]
        given = LeaveOneOut()(group, advantage)
        return [[value + part for value, part in zip(*own, strict=True)] for own in zip(given, spread, strict=True)]

    task = bifurcation_tasks()["early"]
    scores = score_credits({"call": LeaveOneOut(), "token": by_token}, task, groups=20)
    assert scores["token"].correlation == pytest.approx(scores["call"].correlation)


def test_exact_values_one_call_ahead_are_the_truth_where_there_is_no_luck() -> None:
    score = score_credit(Critic(lam=0.0), certain(), groups=50)
    assert score.correlation == pytest.approx(1.0)
    assert score.slope == pytest.approx(1.0)
    assert score.cosine > 0.9
    wrong = score_credit(Critic(lam=0.0), certain(), groups=50, value_error=0.5)
    assert wrong.correlation < 0.99


@pytest.mark.slow
def test_exact_values_beat_every_comparison_of_rollouts_on_every_task() -> None:
    named: Mapping[str, Credit] = {"critic": Critic(), "identical": identical, "leave-one-out": LeaveOneOut()}
    for task in bifurcation_tasks().values():
        scores = score_credits(named, task, groups=25)
        for other in ("identical", "leave-one-out"):
            assert scores["critic"].correlation > scores[other].correlation, task.name
            assert scores["critic"].cosine > scores[other].cosine, task.name


@pytest.mark.slow
@pytest.mark.parametrize("task", [early(), consult(), certain()], ids=lambda task: str(task.name))
def test_baselines_that_do_not_see_the_call_leave_the_direction_alone(task: DecisionTask) -> None:
    named: Mapping[str, Credit] = {
        "identical": identical,
        "leave-one-out": LeaveOneOut(),
        "per-agent": per_agent,
        "gigpo": GiGPO(gamma=1.0),
        "critic": Critic(lam=1.0),
    }
    for name, score in score_credits(named, task, groups=100).items():
        assert score.bias < 0.2, name


def test_a_critic_that_errs_biases_only_what_believes_it() -> None:
    scores = score_credits({"far": Critic(lam=1.0), "near": Critic(lam=0.0)}, certain(), groups=100, value_error=0.5)
    assert scores["far"].bias < 0.15 < scores["near"].bias


def test_groups_of_equal_states_help_where_rollouts_meet_again() -> None:
    named: Mapping[str, Credit] = {"identical": identical, "gigpo": GiGPO(), "leave-one-out": LeaveOneOut()}
    meeting = score_credits(named, recombining(), groups=80)
    parting = score_credits(named, recombining(memory=True), groups=80)
    for name in ("gigpo", "leave-one-out"):
        assert meeting[name].correlation > meeting["identical"].correlation
        assert meeting[name].variance < meeting["identical"].variance
        assert meeting[name].correlation > parting[name].correlation
    assert meeting["identical"] == parting["identical"]


def test_an_agent_compared_with_itself_has_less_noise_than_with_rollouts_that_did_without_it() -> None:
    scores = score_credits({"identical": identical, "per-agent": per_agent}, consult(), groups=150)
    assert scores["per-agent"].variance < scores["identical"].variance


@pytest.mark.slow
def test_rewards_at_their_calls_help_where_they_are_paid_at_once_and_mislead_where_later() -> None:
    named: Mapping[str, Credit] = {"identical": identical, "intermediate": Intermediate()}
    at_once = score_credits(named, wasteful_tool(), groups=100)
    assert at_once["intermediate"].cosine > at_once["identical"].cosine
    later = score_credits(named, late_bill(), groups=80)
    assert later["identical"].cosine > 0.2 > later["intermediate"].cosine
    assert later["intermediate"].bias > 0.9


def test_a_scale_changes_the_slope_alone() -> None:
    scores = score_credits({"one": identical, "three": scaled(identical, 3.0)}, early(), groups=40)
    one, three = scores["one"], scores["three"]
    assert three.slope == pytest.approx(3 * one.slope)
    for name in ("correlation", "bias", "variance", "cosine"):
        assert getattr(three, name) == pytest.approx(getattr(one, name))


def test_blame_for_praise_is_all_wrong() -> None:
    score = score_credit(scaled(identical, -1.0), early(), groups=100)
    assert score.correlation < 0
    assert score.slope < 0
    assert score.cosine < 0
    assert score.bias == 1.0


def test_no_credit_is_no_signal() -> None:
    score = score_credit(nothing, early(), groups=10)
    assert (score.correlation, score.slope, score.bias, score.cosine) == (0.0, 0.0, 1.0, 0.0)
    assert score.variance == float("inf")


def test_group_and_leave_one_out_means_differ_by_scale_alone() -> None:
    one, other = (score_credit(identical, late(), groups=40, advantage=low) for low in (rloo, centre))
    assert other.slope == pytest.approx(one.slope * 7 / 8)
    assert other.cosine == pytest.approx(one.cosine)


def test_variance_is_how_many_groups_make_noise_as_small_as_signal() -> None:
    """Four times the rollouts in a group: a fourth of the noise."""
    small = score_credit(Critic(lam=1.0), early(), groups=160, group_size=4)
    large = score_credit(Critic(lam=1.0), early(), groups=80, group_size=16)
    assert small.variance / large.variance == pytest.approx(4.0, rel=0.4)


@pytest.mark.parametrize("wrong", [lambda group, advantage: [], lambda group, advantage: [
    np.full(len(member.transitions), np.nan) for member in group.trajectories
]])  # fmt: skip
def test_a_credit_that_does_not_give_numbers_is_named(wrong: Credit) -> None:
    with pytest.raises(DataError, match="one finite advantage for each call"):
        score_credit(wrong, early(), groups=2)


def test_where_nothing_matters_there_is_nothing_to_score() -> None:
    flat = DecisionTask(
        "flat", {"only": Decision((Action(1.0, (ActionOutcome(0.5, reward=1.0), ActionOutcome(0.5))),))}
    )
    with pytest.raises(ConfigError, match="flat: none of the trained decisions"):
        score_credit(identical, flat)
    with pytest.raises(ConfigError, match="groups=1"):
        score_credit(identical, early(), groups=1)
