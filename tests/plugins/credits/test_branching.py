"""Credit from branches: by hand, beside its definition, and exactly: over all groups that a small task can give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import centre, group_returns, grpo, rloo
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.testing.decisions import (
    Action,
    ActionOutcome,
    Decision,
    DecisionPath,
    DecisionTask,
    branch_of,
    path_trajectory,
)
from lightning.testing.trajectories import make_trajectory
from lightning_credits import Branched

few = settings(max_examples=60)
number = st.integers(-8, 8).map(lambda value: value / 4)
CALL = ((1,), (3,))


def member(index: int, calls: int, reward: float, parent: tuple[str, int, int] | None = None) -> Trajectory:
    made = make_trajectory([CALL] * calls, rollout=f"g/{index}", index=index, reward=reward)
    return replace(made, rollout=replace(made.rollout, parent=parent))


@st.composite
def trees(draw: st.DrawFn) -> Group:
    """Rollouts, branches of them, branches of branches, and some whose parent is gone."""
    members: list[Trajectory] = []
    for index in range(draw(st.integers(1, 7))):
        able = [(each.rollout.id, 1, call.seq) for each in members for call in each.transitions]
        parent = draw(st.sampled_from([None, *able, ("gone", 1, 2), ("gone", 1, 3)]))
        members.append(member(index, draw(st.integers(0 if parent is None else 1, 4)), draw(number), parent))
    return Group("g", tuple(draw(st.permutations(members))))


def slow_branching(group: Group, prior: float, shared: bool) -> list[list[float]]:
    """The definition, as a recursion over (rollout, call from which a segment goes on)."""
    known = {each.rollout.id: each for each in group.trajectories}
    returns = dict(zip(known, group_returns(group), strict=True))

    def begins(each: Trajectory) -> tuple[str, int, int] | None:
        parent = each.rollout.parent
        return begins(known[parent[0]]) if parent and parent[0] in known and not parent[2] else parent

    def cuts(name: str) -> list[int]:
        return sorted({node[2] for each in known.values() if (node := begins(each)) and node[0] == name})

    def continuations(node: tuple[str, int, int] | None) -> list[tuple[str, int]]:
        found = [(name, 0) for name, each in known.items() if begins(each) == node]
        return [*found, (node[0], node[2])] if node and node[0] in known else found

    def value(name: str, start: int) -> float:
        later = [cut for cut in cuts(name) if cut > start]
        if not later:
            return float(returns[name])
        return float(np.mean([value(*each) for each in continuations((name, 1, later[0]))]))

    def judged(name: str, start: int) -> tuple[float, float | None, float]:
        """Advantage, baseline and share of the segment that goes on from this call."""
        node = begins(known[name]) if not start else (name, 1, start)
        everyone = continuations(node)
        others = [value(*each) for each in everyone if each != (name, start)]
        base = float(np.mean(others)) if others else None
        share = 1.0 if node is None or (node in starts and len(starts) == 1) else 1.0 / len(everyone)
        if node is not None and node[0] in known:
            earlier = [cut for cut in cuts(node[0]) if cut < node[2]]
            _, outer, above = judged(node[0], earlier[-1] if earlier else 0)
            share *= above
            if outer is not None:
                assert base is not None
                base = (len(others) * base + prior * outer) / (len(others) + prior)
        return (0.0 if base is None else value(name, start) - base), base, share

    starts = {node for each in known.values() if (node := begins(each)) is None or node[0] not in known}
    found = []
    for name, each in known.items():
        mine = []
        for call in each.transitions:
            advantage, _, share = judged(name, max((cut for cut in cuts(name) if cut <= call.seq), default=0))
            mine.append(advantage * share if shared else advantage)
        found.append(mine)
    return found


@few
@given(trees(), st.sampled_from([0.0, 1.0, 2.5]), st.booleans())
def test_it_is_what_its_definition_says(group: Group, prior: float, shared: bool) -> None:
    found = Branched(prior, shared)(group, centre)
    for one, other in zip(found, slow_branching(group, prior, shared), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, atol=1e-9)


@few
@given(trees(), st.data())
def test_the_order_of_the_group_changes_nothing(group: Group, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(group.trajectories))))
    found = Branched()(group, rloo)
    again = Branched()(Group("g", tuple(group.trajectories[index] for index in order)), rloo)
    for place, index in enumerate(order):
        np.testing.assert_allclose(again[place], found[index], atol=1e-12)


@few
@given(trees(), number, st.sampled_from([centre, grpo, rloo]))
def test_a_constant_changes_nothing_and_equal_rewards_teach_nothing(group: Group, amount: float, advantage) -> None:  # type: ignore[no-untyped-def]
    def with_reward(each: Trajectory, reward: float) -> Trajectory:
        return replace(each, rollout=replace(each.rollout, reward=reward))

    raised = Group("g", tuple(with_reward(each, each.reward + amount) for each in group.trajectories))
    for one, other in zip(Branched()(raised, advantage), Branched()(group, centre), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    tied = Group("g", tuple(with_reward(each, amount / 3) for each in group.trajectories))
    assert all((part == 0.0).all() for part in Branched()(tied, advantage))


@few
@given(st.lists(st.tuples(st.integers(0, 4), number), min_size=1, max_size=6), st.booleans())
def test_without_branches_it_is_leave_one_out_of_whole_rollouts(drawn: list[tuple[int, float]], shared: bool) -> None:
    group = Group("g", tuple(member(index, calls, reward) for index, (calls, reward) in enumerate(drawn)))
    found = Branched(shared=shared)(group, centre)
    for own, each, value in zip(found, group.trajectories, rloo(group_returns(group)), strict=True):
        assert own.tolist() == [value] * len(each.transitions)


def test_by_hand() -> None:
    """A trunk earns 1, the other 0. From the second call of the first on, two branches earn 0 and 0.5: the first call was
    worth 0.5, and the rest of the trunk was lucky."""
    trunk = member(0, 3, 1.0)
    at = trunk.transitions[1].key
    group = Group("g", (trunk, member(1, 2, 0.0), member(2, 2, 0.0, at), member(3, 1, 0.5, at)))
    plain = [part.tolist() for part in Branched(prior=0.0, shared=False)(group, centre)]
    assert plain == [[0.5, 0.75, 0.75], [-0.5, -0.5], [-0.75, -0.75], [0.0]]
    shared = Branched(prior=0.0)(group, centre)
    np.testing.assert_allclose(shared[0], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(shared[3], [0.0])
    mixed = Branched(prior=1.0, shared=False)(group, centre)
    np.testing.assert_allclose(mixed[0], [0.5, 1 - 0.5 / 3, 1 - 0.5 / 3])
    np.testing.assert_allclose(mixed[2], [-0.5, -0.5])


def test_what_has_nothing_to_be_compared_with_gets_nothing() -> None:
    trunk = member(0, 3, 1.0)
    alone = Group("g", (trunk, member(1, 1, 0.0, trunk.transitions[1].key)))
    assert [part.tolist() for part in Branched(shared=False)(alone, centre)] == [[0.0, 1.0, 1.0], [-1.0]]
    lost = Group("g", (member(0, 2, 1.0), member(1, 2, 0.0), member(2, 1, 5.0, ("gone", 1, 3))))
    assert [part.tolist() for part in Branched()(lost, centre)] == [[1.0, 1.0], [-1.0, -1.0], [0.0]]
    two = Group("g", (*lost.trajectories, member(3, 1, 4.0, ("gone", 1, 3))))
    assert [part.tolist() for part in Branched()(two, centre)][2:] == [[0.5], [-0.5]]
    assert [part.tolist() for part in Branched()(Group("g", ()), centre)] == []


def test_another_attempt_of_the_parent_is_another_rollout() -> None:
    name, _, seq = member(0, 3, 1.0).transitions[1].key
    group = Group("g", (member(0, 3, 1.0), member(1, 3, 0.0), member(2, 1, 0.5, (name, 2, seq))))
    assert [part.tolist() for part in Branched()(group, centre)] == [[1.0] * 3, [-1.0] * 3, [0.0]]


def test_calls_that_were_under_way_are_part_of_what_follows() -> None:
    """Call 1 had not been answered when call 2 was sent, so a branch at call 2 samples both anew."""
    made = member(0, 4, 1.0)
    times = ((0.0, 1.0), (2.0, 9.0), (3.0, 4.0), (10.0, 11.0))
    calls = (
        replace(call, started_at=start, ended_at=end)
        for call, (start, end) in zip(made.transitions, times, strict=True)
    )
    trunk = replace(made, transitions=tuple(calls))
    group = Group("g", (trunk, member(1, 1, 0.5), member(2, 3, 0.0, trunk.transitions[2].key)))
    found = Branched(prior=0.0, shared=False)(group, centre)
    assert [part.tolist() for part in found] == [[0.0, 1.0, 1.0, 1.0], [0.0], [-1.0] * 3]


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="prior=-1"):
        Branched(-1)
    assert plugins().credit("branch") == Branched()


SMALL = DecisionTask(
    "small",
    {
        "first": Decision((Action(0.6, (ActionOutcome(state="second"),)), Action(0.4, (ActionOutcome(reward=0.3),)))),
        "second": Decision(
            (
                Action(0.3, (ActionOutcome(state="third", step_reward=-0.2),)),
                Action(0.5, (ActionOutcome(reward=1.0),)),
                Action(0.2, (ActionOutcome(),)),
            )
        ),
        "third": Decision((Action(0.5, (ActionOutcome(reward=2.0),)), Action(0.5, (ActionOutcome(),)))),
    },
)
"""Rollouts of one to three calls, without luck but for the policy's."""


def continuations(path: DecisionPath, at: int) -> list[tuple[float, DecisionPath]]:
    """All that may come of a path which leads to the state `at`, each with its probability."""
    found = []
    for place, action in enumerate(list(SMALL.states.values())[at].actions):
        (outcome,) = action.outcomes
        here = DecisionPath(
            [*path.states, at], [*path.actions, place], [*path.steps, outcome.step_reward], outcome.reward
        )
        if outcome.state:
            after = continuations(here, list(SMALL.states).index(outcome.state))
            found += [(action.probability * chance, whole) for chance, whole in after]
        else:
            found.append((action.probability, here))
    return found


Points = Callable[[DecisionPath], list[int]]
"""At which calls a rollout is branched."""


def grown(
    paths: Sequence[DecisionPath], points: Points
) -> Iterator[tuple[float, list[tuple[Trajectory, DecisionPath]]]]:
    """All trees with these trunks, each with its probability: the members, and the calls that are their own."""
    trunks = [path_trajectory(SMALL, path, "g", index) for index, path in enumerate(paths)]
    at = [(trunk, path, call) for trunk, path in zip(trunks, paths, strict=True) for call in points(path)]
    ways = [continuations(path.part(slice(call)), path.states[call]) for _, path, call in at]
    for chosen in itertools.product(*ways):
        members = list(zip(trunks, paths, strict=True))
        for (trunk, _, call), (_, whole) in zip(at, chosen, strict=True):
            made = path_trajectory(SMALL, whole, "g", len(members))
            members.append((branch_of(made, trunk, call), whole.part(slice(call, None))))
        yield float(np.prod([chance for chance, _ in chosen])), members


def expected(credit: Branched, trunks: int, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """The expected gradient of a group for each trunk, and how often its calls are in each state: a sum over all groups."""
    truth = SMALL.truth()
    gradient, visits = np.zeros(truth.policy.shape), np.zeros(len(truth.policy))
    for drawn in itertools.product(continuations(DecisionPath(), 0), repeat=trunks):
        first = float(np.prod([chance for chance, _ in drawn]))
        for chance, members in grown([path for _, path in drawn], points):
            given = credit(Group("g", tuple(trajectory for trajectory, _ in members)), centre)
            for values, (_, own) in zip(given, members, strict=True):
                for value, state, action in zip(values, own.states, own.actions, strict=True):
                    gradient[state] -= first * chance * value * truth.policy[state] / trunks
                    gradient[state, action] += first * chance * value / trunks
                    visits[state] += first * chance / trunks
    return gradient, visits


def once(path: DecisionPath) -> list[int]:
    """Each call but the first, as far as the rollout comes."""
    return list(range(1, len(path.states)))


def unevenly(path: DecisionPath) -> list[int]:
    """One branch at the second call, two at the third."""
    return [call for call in (1, 2, 2) if call < len(path.states)]


@pytest.mark.parametrize(("points", "prior"), [(once, 0.0), (once, 2.5), (unevenly, 1.0)])
def test_the_expected_gradient_is_exact(points: Points, prior: float) -> None:
    gradient, _ = expected(Branched(prior), 2, points)
    np.testing.assert_allclose(gradient, SMALL.truth().gradient, atol=1e-12)


def test_without_shares_each_states_gradient_is_exact_and_counts_as_often_as_it_was_sampled() -> None:
    truth = SMALL.truth()
    gradient, visits = expected(Branched(shared=False), 2, once)
    np.testing.assert_allclose(visits, truth.visits * [1, 2, 3], atol=1e-12)
    np.testing.assert_allclose(gradient, truth.gradient * [[1], [2], [3]], atol=1e-12)


def test_a_single_trunk_teaches_what_comes_after_its_first_node() -> None:
    gradient, _ = expected(Branched(), 1, once)
    np.testing.assert_allclose(gradient[1:], SMALL.truth().gradient[1:], atol=1e-12)
    assert not gradient[0].any()


def test_calls_that_are_chosen_for_their_answers_bias_it() -> None:
    """The condition that the docstring names is one: here a call is branched where it ended the rollout."""
    gradient, _ = expected(Branched(), 2, lambda path: [call for call in once(path) if call == len(path.states) - 1])
    assert np.abs(gradient - SMALL.truth().gradient).max() > 0.01
