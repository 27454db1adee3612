"""What every credit must keep to, whatever it does: order, constants, equal rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import Credit, Decayed, Discounted, GroupAdvantage, centre, grpo, identical, per_agent, rloo
from lightning.plugins import plugins
from lightning.testing.trajectories import make_trajectory
from lightning.types import Caller, StepReward
from lightning_credits import AgentTurn, Branched, Critic, GiGPO, Intermediate, LeaveOneOut, Weighted

COMPARING: dict[str, Credit] = {
    "identical": identical,
    "decayed": Decayed(0.5),
    "discounted": Discounted(1.0),
    "per-agent": per_agent,
    "agent-turn": AgentTurn(),
    "leave-one-out": LeaveOneOut(),
    "gigpo": GiGPO(gamma=1.0),
    "branch": Branched(),
    "intermediate": Intermediate(),
}
"""Credits that compare within the group, without a discount where that would make the length of a rollout count."""

WEIGHTED: dict[str, Credit] = {"weighted": Weighted(), "weighted-variance": Weighted(by="variance")}
EVERY = {**COMPARING, "discounted": Discounted(0.5), "gigpo": GiGPO(gamma=0.5), "critic": Critic(), **WEIGHTED}
ESTIMATORS = st.sampled_from([centre, grpo, rloo])
few = settings(max_examples=40)
number = st.integers(-8, 8).map(lambda value: value / 4)


@st.composite
def groups(draw: st.DrawFn, *, steps: bool = True) -> Group:
    """Rollouts of two agents in few states, with values for a critic."""
    members = []
    for index in range(draw(st.integers(2, 6))):
        calls = draw(st.lists(st.tuples(st.integers(0, 2), st.booleans(), number, number), max_size=5))
        made = make_trajectory([((prompt,), (3,)) for prompt, *_ in calls], rollout=f"g/{index}", reward=draw(number))
        transitions = tuple(
            replace(call, caller=Caller("one" if first else "two"))
            for call, (_, first, *_) in zip(made.transitions, calls, strict=True)
        )
        rewards = tuple(StepReward(step, "r", f"g/{index}/{call}") for call, (*_, step, _) in enumerate(calls))
        values = tuple(value for *_, value in calls)
        members.append(
            replace(made, transitions=transitions, step_rewards=rewards if steps else (), values=values or (0.0,))
            if calls
            else made
        )
    return Group("g", tuple(members))


def plus(trajectory: Trajectory, amount: float) -> Trajectory:
    return replace(trajectory, rollout=replace(trajectory.rollout, reward=trajectory.reward + amount))


def test_every_registered_credit_is_held_to_the_laws() -> None:
    asking = {"judge"}  # it asks a model: tests/plugins/debug/test_judge.py
    assert {*plugins().names("credits")} - asking == {*EVERY}


@few
@given(group=groups(), advantage=ESTIMATORS, data=st.data())
def test_the_order_of_rollouts_is_the_order_of_advantages(group: Group, advantage: GroupAdvantage, data) -> None:  # type: ignore[no-untyped-def]
    order = data.draw(st.permutations(range(len(group.trajectories))))
    permuted = Group("g", tuple(group.trajectories[index] for index in order))
    for name, credit in EVERY.items():
        found, shuffled = credit(group, advantage), credit(permuted, advantage)
        for place, index in enumerate(order):
            np.testing.assert_allclose(shuffled[place], found[index], atol=1e-9, err_msg=name)


@few
@given(group=groups(), advantage=ESTIMATORS)
def test_each_call_gets_one_finite_number_in_float64(group: Group, advantage: GroupAdvantage) -> None:
    for name, credit in EVERY.items():
        found = credit(group, advantage)
        assert [part.shape for part in found] == [(len(member.transitions),) for member in group.trajectories], name
        assert all(part.dtype == np.float64 and np.isfinite(part).all() for part in found), name


@few
@given(group=groups(), amount=number, advantage=ESTIMATORS)
def test_a_constant_added_to_every_reward_changes_nothing(
    group: Group, amount: float, advantage: GroupAdvantage
) -> None:
    raised = Group("g", tuple(plus(member, amount) for member in group.trajectories))
    for name, credit in COMPARING.items():
        for one, other in zip(credit(raised, advantage), credit(group, advantage), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9, err_msg=name)


@few
@given(group=groups(steps=False), reward=number, advantage=ESTIMATORS)
def test_equal_rewards_teach_nothing(group: Group, reward: float, advantage: GroupAdvantage) -> None:
    tied = Group("g", tuple(plus(member, reward - member.reward) for member in group.trajectories))
    for name, credit in {**COMPARING, **WEIGHTED}.items():
        assert all((part == 0.0).all() for part in credit(tied, advantage)), name


@few
@given(group=groups(), advantage=ESTIMATORS, data=st.data())
def test_calls_of_agents_that_are_not_trained_change_nothing(group: Group, advantage: GroupAdvantage, data) -> None:  # type: ignore[no-untyped-def]
    """Time is counted in turns: a discount does not shrink through what another agent calls."""
    members, places = [], []
    for member in group.trajectories:
        calls, flags, values = [], [], []
        for place in range(len(member.transitions) + 1):
            for _ in range(data.draw(st.integers(0, 2)) if member.transitions else 0):
                seq = len(calls)
                other = make_trajectory([((90, seq), (3,))], rollout=member.rollout.id).transitions[0]
                calls.append(replace(other, id=f"other-{seq}", caller=Caller("other"), started_at=9.0, ended_at=9.0))
                flags.append(False)
                values.append(float("nan"))
            if place < len(member.transitions):
                calls.append(member.transitions[place])
                flags.append(True)
                values.append(member.values[place])
        numbered = tuple(replace(call, seq=seq) for seq, call in enumerate(calls))
        places.append(np.flatnonzero(flags))
        members.append(replace(member, transitions=numbered, trainable=tuple(flags), values=tuple(values)))
    for name, credit in EVERY.items():
        alone, beside = credit(group, advantage), credit(Group("g", tuple(members)), advantage)
        for own, found, place in zip(alone, beside, places, strict=True):
            np.testing.assert_allclose(found[place], own, atol=1e-9, err_msg=name)


@few
@given(group=groups(), advantage=ESTIMATORS, masked=st.integers(0, 5), other=st.integers(2, 4))
def test_a_rollout_that_is_not_trained_counts_for_the_others_as_if_it_were(
    group: Group, advantage: GroupAdvantage, masked: int, other: int
) -> None:
    """`trainer.policy_fault` = mask. Some calls are another agent's."""
    members = [
        replace(member, trainable=tuple(place % other > 0 for place in range(len(member.transitions))))
        for member in group.trajectories
    ]
    group = Group("g", tuple(members))
    index = masked % len(members)
    whole = members[index]
    members[index] = replace(whole, trainable=(False,) * len(whole.transitions), of_interest=whole.trainable)
    for name, credit in EVERY.items():
        before, after = credit(group, advantage), credit(Group("g", tuple(members)), advantage)
        for place, (own, found) in enumerate(zip(before, after, strict=True)):
            if place != index:
                np.testing.assert_allclose(found, own, atol=1e-9, err_msg=name)
