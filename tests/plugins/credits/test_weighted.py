"""Weights of groups: larger for hard tasks, or for those of which half is solved, and 1 for a middling one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.spec import make_algorithm, parse_algorithms
from lightning.batch import Advantages, Group
from lightning.credit import Decayed, GroupAdvantage, identical, rloo
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.runs import describe_algorithm, rebuild_algorithm
from lightning.trainer.training_data import batch_digest
from lightning_credits import Critic, Weighted

BY = st.sampled_from(["difficulty", "variance"])


def group(*rewards: float) -> Group:
    calls = [((1,), (2,)), ((1, 2), (3,))]
    return Group(
        "g",
        tuple(
            make_trajectory(calls, rollout=f"g/{index}", index=index, reward=reward)
            for index, reward in enumerate(rewards)
        ),
    )


def of(solved: int, size: int = 8) -> Group:
    return group(*(float(index < solved) for index in range(size)))


def test_hard_groups_count_more_and_half_solved_ones_once() -> None:
    weights = [Weighted().weight(of(solved)) for solved in range(9)]
    assert weights == sorted(weights, reverse=True)
    assert (weights[0], weights[1], weights[4], weights[7], weights[8]) == (2.0, 1.75, 1.0, 0.25, 0.0)


def test_by_variance_groups_that_are_half_solved_count_most() -> None:
    weights = [Weighted(by="variance").weight(of(solved)) for solved in range(9)]
    assert weights == pytest.approx([4 * solved / 8 * (1 - solved / 8) for solved in range(9)])
    assert max(weights) == weights[4] == 1.0


def test_advantages_of_the_other_credit_are_multiplied() -> None:
    for inner in (identical, Decayed(0.5)):
        one, other = Weighted(inner)(of(2), rloo), inner(of(2), rloo)
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_allclose(mine, 1.5 * its)


@given(rewards=st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=9), by=BY)
def test_any_returns_give_a_weight_from_0_to_2(rewards: list[float], by: str) -> None:
    weight = Weighted(by=by).weight(group(*rewards))  # type: ignore[arg-type]
    assert 0.0 <= weight <= 2.0 + 1e-9


@given(low=st.integers(-50, 50), width=st.integers(1, 50), solved=st.integers(1, 7), by=BY)
def test_the_range_of_rewards_may_be_given(low: int, width: int, solved: int, by: str) -> None:
    moved = group(*(float(low + width * (index < solved)) for index in range(8)))
    one = Weighted(by=by, worst=float(low), best=float(low + width))  # type: ignore[arg-type]
    assert one.weight(moved) == pytest.approx(Weighted(by=by).weight(of(solved)))  # type: ignore[arg-type]


@given(rewards=st.lists(st.integers(-20, 20), min_size=2, max_size=8), by=BY)
def test_no_group_that_could_teach_is_silenced(rewards: list[int], by: str) -> None:
    weight = Weighted(by=by).weight(group(*map(float, rewards)))  # type: ignore[arg-type]
    assert weight > 0 or len(set(rewards)) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"by": "luck"}, "by='luck' is no weight: use one of difficulty, variance"),
        ({"worst": 1.0}, "worst=1.0 must be lower than best=1.0"),
        ({"best": float("nan")}, "both must be finite"),
        ({"credit": 3}, "credit=3: give a registered name"),
        ({"credit": Decayed}, "the credit is the class Decayed, not an object of it"),
    ],
)
def test_what_is_no_weight_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Weighted(**given)  # type: ignore[arg-type]


def test_a_critic_below_is_still_trained() -> None:
    inner = Critic(lam=0.5)
    over = Weighted(inner)
    assert over.head
    assert Weighted("critic").head
    assert LightningRL("ppo", credit=over).head
    assert over.value_targets == inner.value_targets
    assert not Weighted().head
    assert Weighted().value_targets is None


def test_it_is_found_by_name_and_made_again_from_a_record() -> None:
    (phase,) = parse_algorithms("grpo:credit=weighted-variance,group_size=4")
    made = make_algorithm(phase)
    assert isinstance(made, LightningRL)
    assert plugins().credit("weighted") == Weighted()
    assert plugins().credit("weighted-variance") == Weighted(by="variance")
    for credit in ("weighted-variance", Weighted(Decayed(0.3), by="variance", worst=-1.0)):
        algorithm = dataclasses.replace(made, credit=credit)
        assert rebuild_algorithm({"algorithm": describe_algorithm(algorithm)}) == algorithm


def test_a_batch_has_the_weighted_advantages() -> None:
    for solved, weight in ((1, 1.5), (2, 1.0), (3, 0.5)):
        weighted = LightningRL("rloo", credit="weighted").batch([of(solved, 4)])
        plain = LightningRL("rloo").batch([of(solved, 4)])
        assert len(weighted.samples) == len(plain.samples)
        for mine, its in zip(weighted.samples, plain.samples, strict=True):
            np.testing.assert_allclose(mine.advantages, weight * its.advantages, rtol=1e-6)


def test_a_credit_that_adds_rewards_is_refused_by_object_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Judging:
        rewards = True

        def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
            return identical(group, advantage)

    cure = r"Weighted cannot wrap Judging.*Judging\(\.\.\., credit=Weighted\(\.\.\.\)\)"
    with pytest.raises(ConfigError, match=cure):
        Weighted(Judging(), by="variance")
    monkeypatch.setattr(type(plugins()), "get", lambda self, kind, name: Judging())
    with pytest.raises(ConfigError, match=cure):
        _ = LightningRL(credit=Weighted("judging")).head


def test_tokens_that_are_all_alike_are_weighted_as_their_call() -> None:
    def spread(group: Group, advantage: GroupAdvantage) -> Advantages:
        return [
            [np.full(len(call.response_ids), value) for call, value in zip(member.transitions, values, strict=True)]
            for member, values in zip(group.trajectories, identical(group, advantage), strict=True)
        ]

    made = [LightningRL(credit=Weighted(credit)).batch([group(1.0, 0.0, 0.25)]) for credit in ("identical", spread)]
    assert batch_digest(made[0]) == batch_digest(made[1])


def test_an_argument_that_a_credit_does_not_take_is_an_error_of_ours() -> None:
    critic: Any = Critic
    with pytest.raises(ConfigError, match="Critic has no argument 'lamda'; did you mean 'lam'"):
        critic(lamda=0.9)
