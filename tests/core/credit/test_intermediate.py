"""Rewards inside a rollout: what tools earn, and which call each reward belongs to."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import call_rewards, with_tool_rewards
from lightning.errors import ConfigError, DataError
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.trainer.runs import describe_algorithm
from lightning.types import Caller, StepReward, ToolEvent

CALL = ((1, 2), (3,))


def three_calls(*events: ToolEvent, rewards: tuple[StepReward, ...] = (), reward: float = 1.0) -> Trajectory:
    """Calls 0, 1, 2 end at 10, 20, 30 and ask for the tools a0, a1, a2."""
    made = make_trajectory([CALL] * 3, reward=reward)
    calls = tuple(
        replace(call, tool_calls=(f"a{seq}",), started_at=10.0 * seq, ended_at=10.0 * seq + 10)
        for seq, call in enumerate(made.transitions)
    )
    return replace(made, transitions=calls, tool_events=events, step_rewards=rewards)


def test_a_tool_earns_its_reward_for_the_call_that_asked_for_it_whenever_it_ended() -> None:
    trajectory = three_calls(
        ToolEvent("search", "error", call_id="a0", at=99.0),
        ToolEvent("search", "ok", call_id="a1", at=15.0),
    )
    rewarded = with_tool_rewards(trajectory, {"ok": 0.5, "error": -1.0})
    assert [item.name for item in rewarded.step_rewards] == ["tool:search", "tool:search"]
    assert call_rewards(rewarded).tolist() == [-1.0, 0.5, 0.0]


def test_a_tool_without_a_call_id_goes_to_the_last_call_that_had_ended() -> None:
    trajectory = three_calls(ToolEvent("search", "error", at=25.0), ToolEvent("search", "error", at=1.0))
    assert call_rewards(with_tool_rewards(trajectory, {"error": -1.0})).tolist() == [-1.0, -1.0, 0.0]


def test_with_several_choices_the_one_that_asked_for_the_tool_earns_its_reward() -> None:
    made = three_calls(ToolEvent("search", "error", call_id="a1", at=15.0), ToolEvent("clock", "ok", at=15.0))
    first, second, last = made.transitions
    calls = (first, replace(second, id=first.id, choice=1, ended_at=first.ended_at), last)
    rewarded = with_tool_rewards(replace(made, transitions=calls), {"error": -1.0, "ok": 0.5})
    assert call_rewards(rewarded).tolist() == [0.5, -1.0, 0.0]


def test_an_id_that_comes_again_means_the_last_call_that_had_ended() -> None:
    made = three_calls(
        ToolEvent("search", "error", call_id="functions.search:0", at=12.0),
        ToolEvent("search", "ok", call_id="functions.search:0", at=25.0),
    )
    calls = tuple(replace(call, tool_calls=("functions.search:0",)) for call in made.transitions)
    rewarded = with_tool_rewards(replace(made, transitions=calls), {"error": -1.0, "ok": 0.5})
    assert call_rewards(rewarded).tolist() == [-1.0, 0.5, 0.0]


def test_a_tool_without_a_call_id_goes_to_a_call_of_the_agent_that_ran_it() -> None:
    made = three_calls(ToolEvent("search", "error", at=25.0, caller=Caller("writer", ("writer",))))
    calls = tuple(
        replace(call, caller=Caller(agent))
        for call, agent in zip(made.transitions, ("writer", "judge", "writer"), strict=True)
    )
    rewarded = with_tool_rewards(replace(made, transitions=calls), {"error": -1.0})
    assert call_rewards(rewarded).tolist() == [-1.0, 0.0, 0.0]


def test_a_function_of_the_event_replaces_the_rule() -> None:
    trajectory = three_calls(
        ToolEvent("search", "ok", call_id="a0", output="no results"), ToolEvent("clock", "ok", call_id="a1")
    )
    rewarded = with_tool_rewards(trajectory, lambda event: -0.25 if event.output == "no results" else 0.0)
    (earned,) = rewarded.step_rewards
    assert (earned.value, earned.name, earned.response_id) == (-0.25, "tool:search", trajectory.transitions[0].id)


def test_statuses_that_earn_nothing_leave_the_trajectory_alone() -> None:
    trajectory = three_calls(ToolEvent("search", "unknown", call_id="a0"))
    assert with_tool_rewards(trajectory, {"error": -1.0}) is trajectory


@given(
    st.lists(
        st.tuples(
            st.floats(-10, 10), st.sampled_from(["", "rollout-0/0", "rollout-0/2", "somebody else's"]), st.floats(0, 40)
        ),
        max_size=20,
    )
)
def test_every_reward_belongs_to_exactly_one_call(given_rewards: list[tuple[float, str, float]]) -> None:
    rewards = tuple(StepReward(value, "r", response, at) for value, response, at in given_rewards)
    found = call_rewards(three_calls(rewards=rewards))
    assert found.shape == (3,)
    np.testing.assert_allclose(found.sum(), sum(value for value, _, _ in given_rewards), atol=1e-9)


SKEW = st.floats(-1e6, 1e6)


@given(SKEW, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans())
def test_the_agents_clock_does_not_matter_where_the_call_is_known(
    skew: float, behind: list[int], by_tool: bool
) -> None:
    calls = three_calls().transitions
    at = [calls[seq].ended_at + 0.1 + skew for seq in behind]
    events = tuple(
        ToolEvent("search", "error", call_id="nobody's", at=when, response_id=calls[seq].id, caller=Caller("else"))
        for seq, when in zip(behind, at, strict=True)
    )
    rewards = tuple(StepReward(-1.0, "r", calls[seq].id, when) for seq, when in zip(behind, at, strict=True))
    made = three_calls(*events) if by_tool else three_calls(rewards=rewards)
    found = call_rewards(with_tool_rewards(made, {"error": -1.0}))
    assert found.tolist() == [-float(behind.count(seq)) for seq in range(3)]


@given(SKEW)
def test_an_id_that_comes_again_means_the_last_call_that_asked_before_the_event(skew: float) -> None:
    made = three_calls(
        ToolEvent("search", "error", call_id="functions.search:0", at=12.0 + skew, response_id="rollout-0/0"),
        ToolEvent("search", "ok", call_id="functions.search:0", at=35.0 + skew, response_id="rollout-0/2"),
    )
    first, second, last = made.transitions
    again = ("functions.search:0",)
    calls = (replace(first, tool_calls=again), replace(second, tool_calls=again), last)
    rewarded = with_tool_rewards(replace(made, transitions=calls), {"error": -1.0, "ok": 0.5})
    assert call_rewards(rewarded).tolist() == [-1.0, 0.5, 0.0]


def test_a_rollout_without_calls_has_no_call_rewards() -> None:
    assert call_rewards(replace(make_trajectory([]), step_rewards=(StepReward(1.0),))).shape == (0,)


def test_tool_rewards_are_part_of_the_return_that_groups_compare() -> None:
    tied = make_group([1.0, 1.0])
    failed = replace(tied.trajectories[0], tool_events=(ToolEvent("search", "error"),))
    group = Group("g", (failed, tied.trajectories[1]))
    assert LightningRL("dr_grpo").batch([group]).skipped == {"all_rewards_equal": 1}
    batch = LightningRL("dr_grpo", tool_reward={"error": -0.5}).batch([group])
    assert [float(row.advantages[-1]) for row in batch.samples] == [-0.25, 0.25]


@pytest.mark.parametrize(
    ("rule", "named"), [({"failed": -1.0}, "'failed'"), ({"error": float("nan")}, "nan"), (7, "tool_reward=7")]
)
def test_a_rule_that_is_none_is_refused(rule: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LightningRL(tool_reward=rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(2)])
def test_a_function_may_compute_with_numpy(value: float) -> None:
    (earned,) = with_tool_rewards(three_calls(ToolEvent("search", "ok")), lambda _: value).step_rewards
    assert type(earned.value) is float
    assert earned.value == value


def test_a_function_that_gives_no_number_is_named_with_its_tool() -> None:
    trajectory = three_calls(ToolEvent("search", "ok"))
    with pytest.raises(DataError, match="gave None for the tool 'search'"):
        with_tool_rewards(trajectory, lambda _: None)  # type: ignore[arg-type, return-value]


def test_a_rule_by_status_is_kept_with_the_run() -> None:
    algorithm = LightningRL(tool_reward={"error": -0.1})
    arguments = describe_algorithm(algorithm)["arguments"]
    assert isinstance(arguments, dict)
    assert LightningRL(**json.loads(json.dumps(arguments))) == algorithm
