"""Groups with branches, in whatever else reads them: the other credits, rewards at calls, weights, and what teaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.intake import Overlong, with_rules
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group, Trajectory, inherited
from lightning.credit import (
    Credit,
    Discounted,
    call_rewards,
    centre,
    group_returns,
    identical,
    returns_to_go,
    with_tool_rewards,
)
from lightning.plugins import plugins
from lightning.testing.trajectories import make_trajectory
from lightning.types import CallStatus, StepReward, ToolEvent
from lightning_credits import Intermediate


def timed(made: Trajectory, begins: float) -> Trajectory:
    """Its calls take a second each, with one between them, and ask for the tools t0, t1, ... each."""
    calls = (
        replace(call, started_at=begins + 2 * seq, ended_at=begins + 2 * seq + 1, tool_calls=(f"t{seq}",))
        for seq, call in enumerate(made.transitions)
    )
    return replace(made, transitions=tuple(calls))


def trunk(index: int = 0, calls: int = 4, reward: float = 1.0, tokens: int = 1) -> Trajectory:
    prompts = [((1,) * (seq + 1), (2,) * tokens) for seq in range(calls)]
    return timed(make_trajectory(prompts, rollout=f"g/{index}", index=index, reward=reward), 0.0)


def branch(
    parent: Trajectory, seq: int, index: int, calls: int = 2, reward: float = 0.0, tokens: int = 1
) -> Trajectory:
    prompts = [((1,) * (seq + place + 1), (3,) * tokens) for place in range(calls)]
    made = timed(make_trajectory(prompts, rollout=f"g/{index}", index=index, reward=reward), 100.0)
    return replace(made, rollout=replace(made.rollout, parent=parent.transitions[seq].key))


def with_steps(member: Trajectory, *steps: StepReward) -> Trajectory:
    return replace(member, step_rewards=steps)


def test_a_branch_has_what_its_parents_had_before_it() -> None:
    first = trunk()
    second = branch(first, 2, 1)
    third = branch(second, 1, 2)
    found = inherited([third, first, second])
    assert [(call.rollout, call.seq) for call, _ in found["g/1"]] == [("g/0", 0), ("g/0", 1)]
    assert [(call.rollout, call.seq) for call, _ in found["g/2"]] == [("g/0", 0), ("g/0", 1), ("g/1", 0)]
    assert "g/0" not in found
    assert not inherited([second])


def test_a_step_reward_of_the_prefix_is_in_the_return_and_in_no_call_of_the_branch() -> None:
    member = with_steps(
        branch(trunk(), 2, 1, reward=1.0),
        StepReward(0.25, response_id="g/0/1", at=500.0),  # of the parent, however late the clock says
        StepReward(0.5, at=99.0),  # nobody knows the call; it was before the branch's own
        StepReward(-1.0, response_id="g/1/1", at=0.0),
        StepReward(-2.0, at=101.5),
    )
    assert call_rewards(member).tolist() == [-2.0, -1.0]
    assert returns_to_go(member).tolist() == [-2.0, 0.0]
    assert group_returns(Group("g", (member,))).tolist() == [-1.25]


def test_a_call_of_its_own_that_was_not_kept_leaves_its_reward_to_time() -> None:
    made = branch(trunk(), 2, 1)
    lost = replace(made.transitions[0], id="broken", seq=2, status=CallStatus.ABORTED)
    member = replace(with_steps(made, StepReward(0.5, response_id="broken", at=102.0)), lost=(lost,))
    assert call_rewards(member).tolist() == [0.5, 0.0]


@given(st.floats(-1e6, 1e6), st.sampled_from(["g/0/0", "g/0/1"]), st.sampled_from(["t0", "t1", "t9"]))
def test_a_tool_run_of_the_prefix_earns_nothing_for_a_call_of_the_branch(at: float, response: str, tool: str) -> None:
    """Also where the policy server counts its ids anew, and the branch's calls ask for tools of the same ids."""
    event = ToolEvent("search", "error", call_id=tool, response_id=response, at=at)
    rewarded = with_tool_rewards(replace(branch(trunk(), 2, 1), tool_events=(event,)), {"error": -1.0})
    assert call_rewards(rewarded).tolist() == [0.0, 0.0]
    assert group_returns(Group("g", (rewarded,))).tolist() == [-1.0]


def test_a_tool_run_of_its_own_is_the_branchs() -> None:
    events = (
        ToolEvent("search", "error", call_id="t1", response_id="g/1/1", at=0.0),
        ToolEvent("clock", "error", at=50.0),  # before its own calls
        ToolEvent("clock", "ok", at=102.0),
        ToolEvent("other", "ok", call_id="t0", at=101.5),
    )
    member = replace(branch(trunk(), 2, 1), tool_events=events)
    assert call_rewards(with_tool_rewards(member, {"error": -1.0, "ok": 0.25})).tolist() == [0.5, -1.0]


def test_a_branchs_calls_are_compared_at_their_places_in_the_whole_rollout() -> None:
    first = trunk(0, 4, reward=4.0)
    group = Group("g", (first, trunk(1, 2, reward=1.0), branch(first, 2, 2, calls=1, reward=1.0)))
    found = Discounted(1.0)(group, centre)
    np.testing.assert_allclose(found[0], [1.5, 1.5, 2.0, 2.0])
    np.testing.assert_allclose(found[1], [-1.5, -1.5])
    np.testing.assert_allclose(found[2], [-1.0])
    orphan = Group("g", (trunk(1, 2, reward=1.0), group.trajectories[2]))
    np.testing.assert_allclose(Discounted(1.0)(orphan, centre)[1], [0.0])


@pytest.mark.parametrize("name", sorted({*plugins().names("credits")} - {"judge"}))
def test_every_credit_gives_each_own_call_a_number(name: str) -> None:
    first = with_steps(trunk(0, 4, reward=1.0), StepReward(0.5, response_id="g/0/1"))
    branches = [with_steps(branch(first, seq, seq), StepReward(0.5, response_id="g/0/1")) for seq in (1, 2, 3)]
    lost = replace(branches[0], rollout=replace(branches[0].rollout, id="g/9", parent=("gone", 1, 3)))
    members = tuple(replace(each, values=(0.5,) * len(each.transitions)) for each in (first, *branches, lost))
    credit: Credit = plugins().credit(name)
    found = credit(Group("g", members), centre)
    assert [part.shape for part in found] == [(len(each.transitions),) for each in members]
    assert all(np.isfinite(part).all() for part in found)


def test_intermediate_counts_a_prefix_once_with_its_parent() -> None:
    first = with_steps(trunk(0, 4, reward=0.0), StepReward(0.6, response_id="g/0/1"))
    group = Group("g", (first, with_steps(branch(first, 2, 1), StepReward(0.6, response_id="g/0/1"))))
    found = Intermediate()(group, centre)
    np.testing.assert_allclose(found[0], [-0.1, 0.5, -0.1, -0.1])
    np.testing.assert_allclose(found[1], [-0.1, -0.1])


def test_a_branch_weighs_as_a_whole_rollout_of_its_length_and_its_prefix_is_trained_once() -> None:
    """Tokens of the trunk: 4 calls of 2. The branch has 2 of these calls, and one of its own of 3 tokens."""
    first = trunk(0, 4, reward=1.0, tokens=2)
    other = branch(first, 2, 1, calls=1, reward=0.0, tokens=3)
    batch = LightningRL("rloo", credit=identical, normalization="rollout-mean").batch([Group("g", (first, other))])
    spans: dict[str, list[tuple[int, float]]] = {}
    for sample in batch.samples:
        for span in sample.spans:
            spans.setdefault(span.rollout, []).append((span.seq, float(sample.weights[span.start])))
    assert sorted(seq for seq, _ in spans["g/0"]) == [0, 1, 2, 3]
    assert [seq for seq, _ in spans["g/1"]] == [0]
    assert {weight for _, weight in spans["g/0"]} == {np.float32(1 / (2 * 8))}
    assert spans["g/1"][0][1] == pytest.approx(1 / (2 * 7))


def test_a_branch_is_as_long_as_the_whole_rollout_for_the_punishment_of_length() -> None:
    first = trunk(0, 4, tokens=2)
    group = Group("g", (first, branch(first, 3, 1, calls=1, reward=0.0, tokens=3)))
    found = with_rules(group, overlong=Overlong(8))
    assert [each.reward for each in found.trajectories] == [1.0, -1.0]


def test_one_rollout_and_its_branches_are_a_group() -> None:
    first = trunk(0, 4, reward=1.0)
    group = Group("g", (first, branch(first, 2, 1, reward=0.0)))
    algorithm = LightningRL("grpo", credit="branch")
    assert algorithm.teaches(group)
    batch = algorithm.batch([group])
    assert not batch.skipped
    trained = {(span.rollout, span.seq) for sample in batch.samples for span in sample.spans}
    assert trained == {("g/0", 2), ("g/0", 3), ("g/1", 0), ("g/1", 1)}


def test_branches_that_earn_what_their_trunk_did_teach_nothing() -> None:
    first = trunk(0, 4, reward=1.0)
    group = Group("g", (first, branch(first, 2, 1, reward=1.0)))
    algorithm = LightningRL("grpo", credit="branch")
    assert not algorithm.teaches(group)
    assert algorithm.batch([group]).skipped == {"all_rewards_equal": 1}


def test_branches_tell_equal_trunks_apart() -> None:
    """Both trunks succeed. A branch shows that the first one could have failed from its third call on."""
    first = trunk(0, 4, reward=1.0)
    group = Group("g", (first, trunk(1, 4, reward=1.0), branch(first, 2, 2, reward=0.0)))
    assert LightningRL("grpo", credit="branch").teaches(group)
    found = plugins().credit("branch")(group, centre)
    assert found[0][0] < 0 < found[0][2]
    assert found[1][0] > 0 > found[2][0]


def test_a_branch_whose_parent_was_dropped_trains_nothing_and_stops_nothing() -> None:
    first = trunk(0, 4, reward=1.0)
    flawed = replace(first, transitions=(*first.transitions[:3], replace(first.transitions[3], versions=())))
    group = Group("g", (flawed, trunk(1, 4, reward=1.0), trunk(2, 4, reward=0.0), branch(first, 2, 3, reward=5.0)))
    batch = LightningRL("grpo", credit="branch").batch([group])
    assert {span.rollout for sample in batch.samples for span in sample.spans} == {"g/1", "g/2"}
    assert batch.dropped == {"bad_versions": 1}
