"""Decision tasks: their truth beside other ways to compute it, and what is sampled from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from lightning.credit import call_rewards, rollout_return
from lightning.errors import ConfigError
from lightning.testing.decisions import (
    Action,
    ActionOutcome,
    Decision,
    DecisionTask,
    bifurcation_tasks,
    late,
    recombining,
    sample_group,
)

TASKS = sorted(bifurcation_tasks())


def two_steps() -> DecisionTask:
    """Left (0.25) earns 0.5 and goes to a coin toss for 1; right ends with 0.2."""
    return DecisionTask(
        "two-steps",
        {
            "first": Decision(
                (Action(0.25, (ActionOutcome(1.0, "toss", 0.0, 0.5),)), Action(0.75, (ActionOutcome(1.0, "", 0.2),)))
            ),
            "toss": Decision((Action(1.0, (ActionOutcome(0.5, "", 1.0), ActionOutcome(0.5))),), "other", trained=False),
        },
    )


def expected_return(task: DecisionTask, policy: np.ndarray) -> float:
    """J of another policy, by following the distribution over states for very long."""
    places = {name: place for place, name in enumerate(task.states)}
    there, total = np.eye(len(places))[0], 0.0
    for _ in range(200):
        following = np.zeros_like(there)
        for place, state in enumerate(task.states.values()):
            for number, action in enumerate(state.actions):
                for outcome in action.outcomes:
                    weight = there[place] * policy[place, number] * outcome.probability
                    total += weight * (outcome.reward + outcome.step_reward)
                    if outcome.state:
                        following[places[outcome.state]] += weight
        there = following
    return total


def nudged(policy: np.ndarray, place: int, action: int, by: float) -> np.ndarray:
    """The policy with one logit raised."""
    logits = np.log(policy[place], out=np.full(policy.shape[1], -np.inf), where=policy[place] > 0)
    logits[action] += by
    moved = policy.copy()
    moved[place] = np.exp(logits) / np.exp(logits).sum()
    return moved


def test_truth_by_hand() -> None:
    truth = two_steps().truth()
    np.testing.assert_allclose(truth.values, [0.25 * (0.5 + 0.5) + 0.75 * 0.2, 0.5])
    np.testing.assert_allclose(truth.advantages, [[1.0 - 0.4, 0.2 - 0.4], [0.0, 0.0]])
    np.testing.assert_allclose(truth.visits, [1.0, 0.25])
    np.testing.assert_allclose(truth.gradient, [[0.25 * 0.6, 0.75 * -0.2], [0.0, 0.0]])


@pytest.mark.parametrize("name", TASKS)
def test_the_gradient_is_the_slope_of_the_expected_return(name: str) -> None:
    task = bifurcation_tasks()[name]
    truth = task.truth()
    assert truth.values[0] == pytest.approx(expected_return(task, truth.policy))
    place, action = np.unravel_index(np.argmax(np.abs(truth.gradient)), truth.gradient.shape)
    ahead, back = (expected_return(task, nudged(truth.policy, int(place), int(action), by)) for by in (1e-4, -1e-4))
    assert (ahead - back) / 2e-4 == pytest.approx(truth.gradient[place, action], rel=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_samples_agree_with_the_truth(name: str) -> None:
    task = bifurcation_tasks()[name]
    truth, rng = task.truth(), np.random.default_rng(0)
    sampled = sample_group(task, 300, rng, values=truth.values)
    returns = np.array([rollout_return(member) for member in sampled.group.trajectories])
    error = returns.std() / np.sqrt(len(returns))
    assert abs(returns.mean() - truth.values[0]) < 5 * error
    visits = np.bincount(np.concatenate(sampled.states), minlength=len(truth.visits)) / len(returns)
    assert np.abs(visits - truth.visits).max() < 5 * np.sqrt(max(truth.visits.max(), 1.0) / len(returns))
    for member, states in zip(sampled.group.trajectories, sampled.states, strict=True):
        decisions = [list(task.states.values())[place] for place in states]
        assert [call.caller.agent for call in member.transitions] == [decision.agent for decision in decisions]
        assert member.trainable == tuple(decision.trained for decision in decisions)
        expected = np.where(member.trainable, truth.values[states], np.nan)
        np.testing.assert_array_equal(member.values, expected)
        assert rollout_return(member) == pytest.approx(member.reward + call_rewards(member).sum())


def prompts(task: DecisionTask) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Each call's prompt, the states and actions that led to it, and its state."""
    sampled = sample_group(task, 60, np.random.default_rng(1))
    for member, states, actions in zip(sampled.group.trajectories, sampled.states, sampled.actions, strict=True):
        for place, call in enumerate(member.transitions):
            history = (*zip(states[:place], actions[:place], strict=True), (states[place], -1))
            yield tuple(call.prompt_ids), tuple(int(x) for pair in history for x in pair), int(states[place])


def same(pairs: Sequence[tuple[object, object]]) -> bool:
    """Whether the first say the same as the second."""
    return len(set(pairs)) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


def test_with_memory_prompts_are_histories_and_without_states() -> None:
    chat, forgetful = list(prompts(recombining(memory=True))), list(prompts(recombining()))
    assert same([(prompt, history) for prompt, history, _ in chat])
    assert same([(prompt, state) for prompt, _, state in forgetful])
    assert not same([(prompt, state) for prompt, _, state in chat])


def test_each_call_of_a_chat_begins_with_the_one_before() -> None:
    (member,) = sample_group(late(), 1, np.random.default_rng(0)).group.trajectories
    for before, after in zip(member.transitions, member.transitions[1:], strict=False):
        whole = [*before.prompt_ids, *before.response_ids]
        assert list(after.prompt_ids)[: len(whole)] == whole
        assert len(after.prompt_ids) == len(whole) + 1


def test_the_same_seed_gives_the_same_rollouts() -> None:
    once, again = (sample_group(late(), 5, np.random.default_rng(7)).group for _ in range(2))
    assert once == again


def test_a_task_says_what_is_wrong_with_it() -> None:
    good = two_steps()
    first = good.states["first"]
    for states, problem in (
        ({"first": first}, "leads to 'toss', which is no state"),
        ({"first": Decision((Action(0.5, (ActionOutcome(),)),))}, "actions of 'first'"),
        ({"first": Decision((Action(1.0, (ActionOutcome(0.4),)),))}, "outcomes in 'first'"),
        ({"first": Decision((Action(1.0, (ActionOutcome(1.0, "first"),)),))}, "'first' can never end"),
        (
            {"first": Decision((Action(1.0, (ActionOutcome(1.0, "x", 1.0),)),)), "x": good.states["toss"]},
            "use step_reward",
        ),
        ({"first": Decision(())}, "actions of 'first'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            replace(good, states=states)
