"""Where a group's rollouts are branched: within the budget, only where it can be done, and as the rule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.batch.trajectory import Trajectory
from lightning.errors import ConfigError
from lightning.testing.trajectories import make_trajectory
from lightning.types import CallStatus, ToolEvent, logprobs
from lightning_branching.branch_points import branch_points
from lightning_branching.config import BranchBy

WAYS: tuple[BranchBy, ...] = ("random", "entropy", "variance")
few = settings(max_examples=60)


def trunk(
    index: int, lengths: Sequence[int], reward: float = 1.0, trainable: Sequence[bool] | None = None
) -> Trajectory:
    """A rollout whose calls sampled so many tokens."""
    calls = [((1,), (2,) * length) for length in lengths]
    return make_trajectory(calls, rollout=f"g/{index}", index=index, reward=reward, trainable=trainable)


def branch(parent: Trajectory, seq: int, number: int, reward: float) -> Trajectory:
    made = make_trajectory([((1,), (2,))], rollout=f"{parent.rollout.id}/{seq}/{number}", reward=reward)
    return replace(made, rollout=replace(made.rollout, parent=parent.transitions[seq].key))


@st.composite
def trunks(draw: st.DrawFn) -> list[Trajectory]:
    """Rollouts of calls of up to 4 tokens, some of them not trained, with gaps in time, tools and broken calls."""
    found = []
    for index in range(draw(st.integers(0, 4))):
        made = trunk(index, draw(st.lists(st.integers(0, 4), max_size=6)))
        at = 0.0
        calls = []
        for call in made.transitions:
            at += draw(st.sampled_from([0.0, 1.0]))
            certain = draw(st.sampled_from([-0.5, -1.0, -2.0]))
            calls.append(
                replace(
                    call,
                    started_at=at,
                    ended_at=at + draw(st.sampled_from([0.0, 1.0, 2.0])),
                    logprobs=logprobs([certain] * len(call.response_ids)),
                    tool_calls=draw(st.sampled_from([(), ("tool",)])),
                )
            )
        flags = tuple(draw(st.booleans()) for _ in calls)
        lost = tuple(replace(call, status=CallStatus.ABORTED) for call in calls if draw(st.integers(0, 9)) == 0)
        kept = [place for place, call in enumerate(calls) if all(call.seq != gone.seq for gone in lost)]
        found.append(
            replace(
                made,
                transitions=tuple(calls[place] for place in kept),
                trainable=tuple(flags[place] for place in kept),
                lost=lost,
            )
        )
    return found


def cost(member: Trajectory, seq: int) -> int:
    """What a trunk sampled from a call on, with the calls that were under way when it was sent."""
    at = next(call for call in member.transitions if call.seq == seq)
    return sum(
        len(call.response_ids) for call in member.transitions if call.seq >= seq or call.ended_at > at.started_at
    )


@few
@given(trunks(), st.integers(0, 60), st.sampled_from(WAYS), st.integers(), st.randoms(use_true_random=False))
def test_points_can_be_branched_fit_the_budget_and_are_the_same_again(members, tokens, by, seed, random) -> None:  # type: ignore[no-untyped-def]
    found = branch_points(members, tokens, by, seed)
    assert sum(cost(member, call.seq) for member, call in found) <= tokens
    for member, call in found:
        place = member.transitions.index(call)
        assert member.trainable[place]
        assert len(call.response_ids)
        assert any(other.seq < call.seq and other.ended_at <= call.started_at for other in member.transitions)
        assert not any(gone.seq < call.seq and gone.ended_at <= call.started_at for gone in member.lost)
    shuffled = list(members)
    random.shuffle(shuffled)
    assert branch_points(shuffled, tokens, by, seed) == found


@few
@given(trunks(), st.integers(0, 60), st.sampled_from(WAYS))
def test_no_tokens_are_left_that_a_branch_could_have_had(members, tokens, by) -> None:  # type: ignore[no-untyped-def]
    found = branch_points(members, tokens, by)
    left = tokens - sum(cost(member, call.seq) for member, call in found)
    possible = branch_points(members, 10_000, by)
    assert all(cost(member, call.seq) > left for member, call in possible)


def test_each_call_but_the_first_is_as_likely() -> None:
    group = [trunk(0, [1] * 4), trunk(1, [1] * 4)]
    first = [branch_points(group, 3, "random", seed)[0] for seed in range(600)]
    for member in group:
        counts = [sum(point == (member, call) for point in first) for call in member.transitions]
        assert counts[0] == 0
        assert all(70 <= count <= 130 for count in counts[1:]), counts


def test_a_call_gets_its_second_branch_when_every_call_has_one() -> None:
    member = trunk(0, [1] * 5)
    seqs = [call.seq for _, call in branch_points([member], 13, "random")]
    assert sorted(seqs[:4]) == [1, 2, 3, 4]
    assert len(seqs) > 4
    again = branch_points([member], 1, "random", branches=[branch(member, 4, 0, 1.0)])
    assert [call.seq for _, call in again] == [4]
    others = branch_points([member], 2, "random", branches=[branch(member, 4, 0, 1.0)])
    assert [call.seq for _, call in others] == [3]


def test_branches_for_each_call_are_as_many_as_was_said_on_average() -> None:
    """A call's number does not depend on what came after it: the trunks begin alike, and are of different lengths."""
    group = [trunk(0, [1] * 3), trunk(1, [1] * 9)]
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(500):
        found = Counter(
            (member.rollout.index, call.seq) for member, call in branch_points(group, 1000, seed=seed, per_call=1.25)
        )
        assert set(found.values()) <= {1, 2}
        assert len(found) == 10
        counts += found
    assert all(575 <= count <= 675 for count in counts.values()), counts
    assert not branch_points(group, 1000, per_call=0)


def uncertain(member: Trajectory, certainty: Sequence[float], tools: Sequence[int]) -> Trajectory:
    """The trunk with these logprobs, whose calls `tools` asked for tools."""
    calls = (
        replace(
            call,
            logprobs=logprobs([certainty[call.seq]] * len(call.response_ids)),
            tool_calls=("tool",) if call.seq in tools else (),
        )
        for call in member.transitions
    )
    return replace(member, transitions=tuple(calls))


def test_the_most_uncertain_answers_to_tool_results_come_first() -> None:
    member = uncertain(trunk(0, [1] * 5), [-9.0, -8.0, -1.0, -2.0, -7.0], tools=(1, 2))
    assert [call.seq for _, call in branch_points([member], 10, "entropy")] == [3, 2, 1, 4]


def test_a_tool_is_known_by_the_call_before_it_as_well() -> None:
    member = replace(trunk(0, [1] * 3), tool_events=(ToolEvent("search", "ok", response_id="g/0/1"),))
    assert [call.seq for _, call in branch_points([member], 3, "entropy")] == [2, 1]


def test_only_the_first_tokens_say_how_uncertain_an_answer_is() -> None:
    calm, late = (trunk(index, [1, 40]) for index in range(2))
    ends = replace(late.transitions[1], logprobs=logprobs([-0.1] * 20 + [-9.0] * 20))
    late = replace(late, transitions=(late.transitions[0], ends))
    assert branch_points([calm, late], 40, "entropy") == [(calm, calm.transitions[1])]


def test_answers_that_are_equally_uncertain_are_branched_at_random() -> None:
    """Else the first trunk would have all branches."""
    trunks = [trunk(index, [1] * 6) for index in range(4)]
    for seed in range(5):
        assert branch_points(trunks, 40, "entropy", seed) == branch_points(trunks, 40, "random", seed)


def test_by_variance_the_first_branches_are_spread_over_the_trunks() -> None:
    group = [trunk(0, [1] * 8), trunk(1, [1] * 8)]
    found = [(member.rollout.index, call.seq) for member, call in branch_points(group, 24, "variance")]
    assert found[:2] == [(0, 4), (1, 4)]
    assert {seq for _, seq in found[2:6]} == {2, 6}


def test_by_variance_more_branches_go_where_returns_differ() -> None:
    """The third return at call 5 takes 1/12 off a variance, the fifth 1/40; the third at call 3 takes 1/1200, for 3 tokens."""
    member = trunk(0, [1] * 6, reward=1.0)
    known = [branch(member, 2, 0, 1.0), branch(member, 3, 0, 0.9), branch(member, 5, 0, 0.0)]
    found = branch_points([member], 3, "variance", branches=known)
    assert [call.seq for _, call in found] == [5, 5, 5]


def test_returns_that_are_all_equal_leave_the_rest_to_calls_without_a_branch() -> None:
    member = trunk(0, [1] * 4, reward=1.0)
    found = branch_points([member], 3, "variance", branches=[branch(member, 2, 0, 1.0)])
    assert next(call.seq for _, call in found) == 1


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="'best'"):
        branch_points([], 1, "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="per_call=nan"):
        branch_points([], 1, per_call=float("nan"))
    with pytest.raises(ConfigError, match="tokens=inf"):
        branch_points([], float("inf"))
