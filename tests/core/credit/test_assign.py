"""How a rollout's advantage is spread over its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import build_samples
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import Credit, Decayed, Discounted, centre, grpo, identical, per_agent, rollout_return
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.types import Caller, StepReward

CALL = ((1, 2), (3,))


def uneven(rewards: tuple[float, ...], calls: tuple[int, ...]) -> Group:
    return Group(
        "g",
        tuple(
            make_trajectory([CALL] * count, rollout=f"g/{index}", index=index, reward=reward)
            for index, (reward, count) in enumerate(zip(rewards, calls, strict=True))
        ),
    )


def with_steps(trajectory: Trajectory, rewards: Mapping[int, float]) -> Trajectory:
    given = tuple(StepReward(value, "r", trajectory.transitions[call].id) for call, value in rewards.items())
    return replace(trajectory, step_rewards=given)


def by_agents(names: Sequence[str], index: int, reward: float) -> Trajectory:
    made = make_trajectory([CALL] * len(names), rollout=f"g/{index}", index=index, reward=reward)
    calls = zip(made.transitions, names, strict=True)
    return replace(made, transitions=tuple(replace(call, caller=Caller(name)) for call, name in calls))


def test_identical_gives_every_call_its_rollouts_advantage() -> None:
    spread = identical(uneven((1.0, 0.0), (3, 1)), centre)
    assert [part.tolist() for part in spread] == [[0.5, 0.5, 0.5], [-0.5]]


def test_statistics_are_per_rollout_never_per_call() -> None:
    few = identical(uneven((1.0, 0.0, 0.0), (1, 1, 1)), grpo)
    many = identical(uneven((1.0, 0.0, 0.0), (50, 1, 1)), grpo)
    assert [part[0] for part in few] == [part[0] for part in many]


def test_decayed_blames_late_calls_most() -> None:
    spread = Decayed(0.5)(uneven((1.0, 0.0), (3, 1)), centre)
    assert [part.tolist() for part in spread] == [[0.125, 0.25, 0.5], [-0.5]]


def test_discounted_compares_what_came_from_each_call_on_with_the_group_at_the_same_place() -> None:
    first = with_steps(uneven((1.0,), (3,)).trajectories[0], {0: 0.5, 1: -1.0})
    second = with_steps(uneven((0.0, 0.0), (1, 2)).trajectories[1], {0: 0.25})
    spread = Discounted(0.5)(Group("g", (first, second)), centre)
    mine, theirs = [0.5 - 0.5 + 0.25, -1.0 + 0.5, 1.0], [0.25, 0.0]
    assert spread[0].tolist() == [(mine[0] - theirs[0]) / 2, (mine[1] - theirs[1]) / 2, (mine[2] - theirs[1]) / 2]
    assert spread[1].tolist() == [(theirs[0] - mine[0]) / 2, (theirs[1] - mine[1]) / 2]


@pytest.mark.parametrize("credit", [Decayed(1.0), Discounted(1.0), per_agent])
def test_without_a_discount_step_rewards_or_other_agents_all_are_identical(credit: Credit) -> None:
    group = uneven((1.0, 0.0, 0.5), (3, 2, 5))
    for one, other in zip(credit(group, grpo), identical(group, grpo), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [Decayed, Discounted])
def test_a_discount_outside_its_range_is_refused(kind: type[Decayed | Discounted]) -> None:
    with pytest.raises(ConfigError, match=r"gamma=1\.5"):
        kind(1.5)


def test_an_agent_is_compared_with_itself_in_the_rollouts_in_which_it_called() -> None:
    group = Group(
        "g",
        (
            by_agents(["router", "expert", "router"], 0, 1.0),
            by_agents(["router", "expert"], 1, 0.5),
            by_agents(["router", "clerk"], 2, 0.0),
        ),
    )
    spread = per_agent(group, centre)
    assert [part.tolist() for part in spread] == [[0.5, 0.25, 0.5], [0.0, -0.25], [-0.5, -0.5]]


@given(st.data())
@pytest.mark.parametrize("credit", [identical, Decayed(0.5), Discounted(0.5), per_agent])
def test_an_untrained_call_counts_as_one_of_another_agent(credit: Credit, data: st.DataObject) -> None:
    """Whatever is marked: trained calls get what they would get if the marked calls were another agent's, and only they
    make rows."""
    marked, others = [], []
    for index in range(3):
        flags = data.draw(st.lists(st.booleans(), min_size=1, max_size=4), label=f"untrained calls of rollout {index}")
        made = make_trajectory(
            [((place,), (9,)) for place in range(len(flags))], rollout=str(index), reward=float(index)
        )
        calls = made.transitions
        marks = [replace(call, untrained="title" if flag else "") for call, flag in zip(calls, flags, strict=True)]
        names = [
            replace(call, caller=Caller("other" if flag else "agent")) for call, flag in zip(calls, flags, strict=True)
        ]
        marked.append(replace(made, transitions=tuple(marks)))
        others.append(replace(made, transitions=tuple(names), trainable=tuple(not flag for flag in flags)))
    groups = Group("g", tuple(marked)), Group("g", tuple(others))
    mine, theirs = (credit(group, grpo) for group in groups)
    for one, other, member in zip(mine, theirs, others, strict=True):
        kept = np.array(member.trainable)
        np.testing.assert_array_equal(one[kept], other[kept])
    rows, wanted = (
        [(row.ids.tolist(), row.weights.tolist()) for row in build_samples(group.trajectories, values)]
        for group, values in zip(groups, (mine, theirs), strict=True)
    )
    assert rows == wanted


def test_agents_of_one_name_at_different_places_are_different_agents() -> None:
    def named(paths: Sequence[str], index: int, reward: float) -> Trajectory:
        made = by_agents(paths, index, reward)
        calls = [
            replace(call, caller=Caller("agent", tuple(call.caller.agent.split("/")))) for call in made.transitions
        ]
        return replace(made, transitions=tuple(calls))

    members = (named(["math/agent", "art/agent"], 0, 1.0), named(["math/agent"], 1, 0.5), named(["art/agent"], 2, 0.0))
    spread = per_agent(Group("g", members), centre)
    assert [part.tolist() for part in spread] == [[0.25, 0.5], [-0.25], [-0.5]]


def test_rewards_given_inside_a_rollout_count() -> None:
    trajectory = replace(make_trajectory(reward=1.0), step_rewards=(StepReward(0.25), StepReward(-0.5, "format")))
    assert rollout_return(trajectory) == 0.75


def test_a_rollout_without_calls_has_statistics_but_no_advantages() -> None:
    group = Group("g", (make_trajectory([], reward=1.0), *make_group([0.0]).trajectories))
    assert [part.tolist() for part in identical(group, centre)] == [[], [-0.5]]


def test_they_are_registered_under_their_names() -> None:
    assert plugins().credit("identical") is identical
    assert plugins().credit("per-agent") is per_agent
    assert plugins().credit("decayed") == Decayed()
    assert plugins().credit("discounted") == Discounted()
