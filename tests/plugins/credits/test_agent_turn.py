"""Calls are compared with those of the same agent at the same turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lightning.batch import Group, Trajectory
from lightning.credit import grpo, rloo
from lightning.testing.trajectories import make_trajectory
from lightning.types import Caller, StepReward
from lightning_credits import AgentTurn


def rollout(name: str, agents: str, reward: float, **steps: float) -> Trajectory:
    """A rollout whose calls come from agents of one letter; `c1=0.5` is a step reward for its call 1."""
    made = make_trajectory([((1,), (2,))] * len(agents), rollout=name, reward=reward)
    calls = tuple(replace(call, caller=Caller(agent)) for call, agent in zip(made.transitions, agents, strict=True))
    rewards = tuple(StepReward(value, "part", calls[int(at[1:])].id) for at, value in steps.items())
    return replace(made, transitions=calls, step_rewards=rewards)


def test_by_hand() -> None:
    one, two, three = rollout("one", "pcp", 1.0, c0=2.0), rollout("two", "pc", 0.0), rollout("three", "ppc", 0.5)
    found = AgentTurn()(Group("g", (one, two, three)), rloo)
    firsts = rloo(np.array([3.0, 0.0, 0.5]))  # the planner's first calls, with what was earned from there on
    coders = rloo(np.array([1.0, 0.0, 0.5]))  # the coder's first calls, which come at different places
    seconds = rloo(np.array([1.0, 0.5]))  # only two rollouts have a second call of the planner
    assert found[0] == pytest.approx([firsts[0], coders[0], seconds[0]])
    assert found[1] == pytest.approx([firsts[1], coders[1]])
    assert found[2] == pytest.approx([firsts[2], seconds[1], coders[2]])


def test_a_call_without_a_counterpart_has_its_rollouts_advantage() -> None:
    one, two = rollout("one", "pj", 1.0), rollout("two", "p", 0.0)
    found = AgentTurn()(Group("g", (one, two)), grpo)
    assert found[0][1] == pytest.approx(grpo(np.array([1.0, 0.0]))[0])


def test_untrained_calls_are_no_turns() -> None:
    one, two = rollout("one", "xp", 1.0), rollout("two", "p", 0.0)
    one = replace(one, trainable=(False, True))
    found = AgentTurn()(Group("g", (one, two)), rloo)
    assert (found[0][1], found[1][0]) == (1.0, -1.0)
