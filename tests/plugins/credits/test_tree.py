"""Credit at shared states, by hand and beside loops over tuples of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import LowLevel
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import centre, group_returns, grpo, returns_to_go, rloo, state_ids
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.testing.trajectories import make_trajectory
from lightning.types import StepReward, token_ids
from lightning_credits import GiGPO, LeaveOneOut

Prompt = tuple[int, ...]
few = settings(max_examples=40)


def through(prompts: Sequence[Prompt], index: int, reward: float, steps: Sequence[float] = ()) -> Trajectory:
    """A rollout whose calls have these prompts and step rewards."""
    made = make_trajectory([(prompt, (3,)) for prompt in prompts], rollout=f"g/{index}", index=index, reward=reward)
    given = tuple(StepReward(value, "r", f"g/{index}/{call}") for call, value in enumerate(steps))
    return replace(made, step_rewards=given)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Rollouts of up to four calls in few states, so that they meet, come by again, and stay alone."""
    prompt = st.lists(st.integers(0, 1), min_size=1, max_size=2).map(tuple)
    number = st.integers(-4, 4).map(lambda value: value / 4)
    members = []
    for index in range(draw(st.integers(1, 5))):
        calls = draw(st.lists(st.tuples(prompt, number), max_size=4))
        members.append(through([c[0] for c in calls], index, draw(number), [c[1] for c in calls]))
    return Group("g", tuple(members))


def slow_leave_one_out(group: Group, prior: float) -> list[list[float]]:
    found = []
    for me in group.trajectories:
        others = [other for other in group.trajectories if other is not me]
        whole = group_returns(Group("g", (me, *others)))
        in_group = whole[0] - whole[1:].mean() if others else 0.0
        mine = []
        for call, value in enumerate(returns_to_go(me)):
            prompt = me.transitions[call].prompt_ids
            means = []
            for other in others:
                visits = [k for k, theirs in enumerate(other.transitions) if theirs.prompt_ids == prompt]
                if visits:
                    means.append(np.mean(returns_to_go(other)[visits]))
            share = len(means) / (len(means) + prior) if means else 0.0
            in_state = value - np.mean(means) if means else 0.0
            mine.append(share * in_state + (1 - share) * in_group)
        found.append(mine)
    return found


def slow_gigpo(group: Group, gamma: float, omega: float, advantage) -> list[list[float]]:  # type: ignore[no-untyped-def]
    episode = advantage(group_returns(group))
    visits: dict[Prompt, list[tuple[int, int, float]]] = {}
    for index, member in enumerate(group.trajectories):
        for call, value in enumerate(returns_to_go(member, gamma)):
            visits.setdefault(tuple(member.transitions[call].prompt_ids), []).append((index, call, value))
    found = [[episode[index]] * len(member.transitions) for index, member in enumerate(group.trajectories)]
    for same in visits.values():
        step = advantage(np.array([value for _, _, value in same]))
        for (index, call, _), value in zip(same, step, strict=True):
            found[index][call] += omega * value
    return found


def check_equal(found: Sequence[np.ndarray], expected: Sequence[Sequence[float]]) -> None:
    assert [len(part) for part in found] == [len(part) for part in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, atol=1e-9)


@few
@given(groups(), st.sampled_from([0.0, 1.0, 2.5]))
def test_leave_one_out_beside_loops(group: Group, prior: float) -> None:
    check_equal(LeaveOneOut(prior)(group, centre), slow_leave_one_out(group, prior))


@few
@given(groups(), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 2.0]), st.sampled_from([centre, grpo, rloo]))
def test_gigpo_beside_loops(group: Group, gamma: float, omega: float, advantage) -> None:  # type: ignore[no-untyped-def]
    check_equal(GiGPO(gamma, omega)(group, advantage), slow_gigpo(group, gamma, omega, advantage))


def test_gigpo_compares_in_a_state_what_the_low_level_does_not_compare() -> None:
    """Three calls in one state earn 3, 1 and 2 from there on; one is alone."""
    group = Group("g", (through([(1,)], 0, 3.0), through([(1,)], 1, 1.0), through([(1,), (2,)], 2, 2.0)))
    found = GiGPO(gamma=1.0, omega=0.5)(group, lambda returns: returns)
    assert [part.tolist() for part in found] == [[3.5], [0.5], [2.0, 2.0]]


@few
@given(groups(), st.sampled_from(["reinforce++", "reinforce++_baseline", "rloo"]))
def test_a_constant_that_every_rollout_earns_changes_no_gigpo_advantage(group: Group, low_level: LowLevel) -> None:
    more = tuple(
        replace(member, rollout=replace(member.rollout, reward=member.reward + 100.0)) for member in group.trajectories
    )
    algorithm = LightningRL(low_level, credit=GiGPO(gamma=1.0), entropy_coefficient=0.1)
    plain, shifted = algorithm.batch([group]), algorithm.batch([Group("g", more)])
    assert len(plain.samples) == len(shifted.samples)
    for one, other in zip(plain.samples, shifted.samples, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, atol=1e-4)


@few
@given(groups())
def test_states_are_equal_where_prompts_are(group: Group) -> None:
    pairs = [
        (int(state), tuple(call.prompt_ids))
        for member, own in zip(group.trajectories, state_ids(group), strict=True)
        for state, call in zip(own, member.transitions, strict=True)
    ]
    assert len(set(pairs)) == len({state for state, _ in pairs}) == len({prompt for _, prompt in pairs})


def test_a_prompt_that_only_begins_like_another_is_another_state() -> None:
    group = Group("g", (through([(1, 2), (1, 2, 3), (1,)], 0, 0.0), through([(1, 2), (513,)], 1, 0.0)))
    assert [own.tolist() for own in state_ids(group)] == [[0, 1, 2], [0, 3]]


def test_leave_one_out_judges_a_call_by_what_others_earned_from_there_on() -> None:
    """Two of three rollouts meet at (7,), which one of them reached with a penalty behind it."""
    group = Group(
        "g",
        (
            through([(1,), (7,)], 0, 1.0, steps=(-0.5, 0.0)),
            through([(1,), (7,)], 1, 0.5),
            through([(1,), (8,)], 2, 0.0),
        ),
    )
    found = LeaveOneOut(prior=0.0)(group, centre)
    assert [part.tolist() for part in found] == [[0.25, 0.5], [0.25, -0.5], [-0.5, -0.5]]


def test_a_baseline_from_few_others_is_mixed_with_the_groups() -> None:
    """One other rollout at (7,), with the weight of one: half of 0.5 above it, half of 0.25 above the group."""
    group = Group("g", (through([(1,), (7,)], 0, 1.0), through([(1,), (7,)], 1, 0.5), through([(1,)], 2, 1.0)))
    np.testing.assert_allclose(LeaveOneOut(prior=1.0)(group, centre)[0], [0.25, 0.375])


def test_the_same_history_with_different_endings_branches() -> None:
    """Siblings share the second state, not the third: their prompts hold what they answered."""
    start, second = (1,), (1, 3, 4)
    group = Group(
        "g",
        (
            through([start, second, (1, 3, 4, 5)], 0, 1.0),
            through([start, second, (1, 3, 4, 6)], 1, 0.0),
            through([start, (1, 9)], 2, 0.5),
        ),
    )
    found = LeaveOneOut(prior=0.0)(group, centre)
    assert [part.tolist() for part in found] == [[0.75, 1.0, 0.75], [-0.75, -1.0, -0.75], [0.0, 0.0]]


def test_long_prompts_are_compared_whole() -> None:
    long = token_ids(list(range(50_000)))
    other = token_ids([*range(49_999), 0])
    members = [through([(1,)], index, 0.0) for index in range(3)]
    prompts = (long, token_ids(long), other)
    group = Group(
        "g",
        tuple(
            replace(member, transitions=(replace(member.transitions[0], prompt_ids=prompt),))
            for member, prompt in zip(members, prompts, strict=True)
        ),
    )
    assert [own.tolist() for own in state_ids(group)] == [[0], [0], [1]]


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="prior=-1"):
        LeaveOneOut(-1)
    with pytest.raises(ConfigError, match=r"gamma=-0\.5"):
        GiGPO(gamma=-0.5)
    with pytest.raises(ConfigError, match="omega=nan"):
        GiGPO(omega=float("nan"))


def test_both_are_registered_under_their_names() -> None:
    assert plugins().credit("leave-one-out") == LeaveOneOut()
    assert plugins().credit("gigpo") == GiGPO()
