"""Groups with branches: what is sampled is a tree of the task, and costs what was said."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from lightning.credit import Credit, group_returns, identical
from lightning.errors import ConfigError
from lightning.testing.decisions import (
    TreeSampling,
    bifurcation_tasks,
    early,
    late,
    retry,
    sample_tree,
    score_credit,
    score_credits,
    wasteful_tool,
)
from lightning_branching.branch_points import branch_points
from lightning_branching.config import BranchBy
from lightning_credits import Branched, LeaveOneOut


@pytest.mark.parametrize("by", ["random", "entropy", "variance"])
@pytest.mark.parametrize(
    "task", [wasteful_tool(), retry(), bifurcation_tasks()["two-agents"]], ids=lambda task: str(task.name)
)
def test_a_branch_goes_on_from_a_state_of_its_trunk(task, by: BranchBy) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    values = task.truth().values
    for _ in range(20):
        sampled = sample_tree(task, 8, TreeSampling(branch_points, 3, by), rng, values=values)
        members = sampled.group.trajectories
        calls = {call.key: (member, place) for member in members for place, call in enumerate(member.transitions)}
        assert [member.rollout.parent for member in members[:3]] == [None] * 3
        assert [member.rollout.index for member in members] == list(range(len(members)))
        for number, member in enumerate(members):
            assert len(member.transitions) == len(member.trainable) == len(member.values) == len(sampled.states[number])
            if member.rollout.parent is not None:
                trunk, place = calls[member.rollout.parent]
                assert place > 0
                assert trunk.rollout.parent is None
                assert member.transitions[0].prompt_ids == trunk.transitions[place].prompt_ids
                assert sampled.states[number][0] == sampled.states[members.index(trunk)][place]


def test_an_answer_has_the_logprob_that_the_policy_gives_it() -> None:
    """So trees by entropy branch first where the policy was least sure."""
    sampled = sample_tree(wasteful_tool(), 8, TreeSampling(branch_points, 8), np.random.default_rng(0))
    decisions = list(wasteful_tool().states.values())
    for member, states, actions in zip(sampled.group.trajectories, sampled.states, sampled.actions, strict=True):
        for call, state, action in zip(member.transitions, states, actions, strict=True):
            (logprob,) = np.asarray(call.logprobs, dtype=np.float32)
            assert np.exp(logprob) == pytest.approx(decisions[state].actions[action].probability)


def test_a_branch_earns_what_its_prefix_did() -> None:
    """Each wasteful call costs a quarter, also one that the branch has from its trunk: those name the trunk's calls."""
    rng = np.random.default_rng(0)
    inherited = 0
    for _ in range(20):
        sampled = sample_tree(wasteful_tool(), 8, TreeSampling(branch_points, 2), rng)
        members = sampled.group.trajectories
        actions = {
            call.id: int(action)
            for member, own in zip(members, sampled.actions, strict=True)
            for call, action in zip(member.transitions, own, strict=True)
        }
        for member, value in zip(members, group_returns(sampled.group), strict=True):
            whole = list(member.transitions)
            if member.rollout.parent is not None:
                trunk = next(other for other in members if other.rollout.id == member.rollout.parent[0])
                whole = [*trunk.transitions[: member.rollout.parent[2]], *whole]
                inherited += sum(
                    reward.response_id.startswith(f"{trunk.rollout.id}/") for reward in member.step_rewards
                )
            wasted = Counter(actions[call.id] for call in whole)[1]
            assert value == pytest.approx(member.reward - 0.25 * wasted)
            assert {reward.response_id for reward in member.step_rewards} <= {call.id for call in whole}
    assert inherited > 10


def test_trees_cost_what_as_many_rollouts_would() -> None:
    assert score_credit(identical, late(), groups=10).calls == 40
    assert score_credit(Branched(), late(), groups=40, tree=TreeSampling(branch_points, 4)).calls == pytest.approx(
        40, rel=0.03
    )
    each = score_credit(Branched(), late(), groups=40, tree=TreeSampling(branch_points, 4, per_call=0.5))
    assert each.calls == pytest.approx(4 * (5 + 0.5 * (4 + 3 + 2 + 1)), rel=0.05)


def test_credit_from_branches_keeps_the_direction_that_others_lose() -> None:
    """Other credits compare a trunk's first call with what came of the same call; and states after a node count too often."""
    named: dict[str, Credit] = {"branch": Branched(), "identical": identical, "leave-one-out": LeaveOneOut()}
    scores = score_credits(named, wasteful_tool(), groups=150, tree=TreeSampling(branch_points, 4))
    assert scores["branch"].bias < 0.2 < min(scores["identical"].bias, scores["leave-one-out"].bias)


def test_credit_from_branches_is_nearer_to_the_truth_where_the_first_call_decides() -> None:
    alone = score_credit(identical, early(), groups=60)
    tree = score_credit(Branched(), early(), groups=60, tree=TreeSampling(branch_points, 4))
    assert tree.correlation > alone.correlation + 0.05


def test_a_tree_has_a_trunk() -> None:
    with pytest.raises(ConfigError, match="trunks=0"):
        TreeSampling(branch_points, 0)
