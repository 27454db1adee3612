"""The credit that adds each call's own step rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit import centre, with_tool_rewards
from lightning.plugins import plugins
from lightning.testing.trajectories import make_trajectory
from lightning.types import StepReward, ToolEvent
from lightning_credits import Intermediate

CALL = ((1, 2), (3,))


def three_calls(*events: ToolEvent, rewards: tuple[StepReward, ...] = (), reward: float = 1.0) -> Trajectory:
    """Calls 0, 1, 2 end at 10, 20, 30 and ask for the tools a0, a1, a2."""
    made = make_trajectory([CALL] * 3, reward=reward)
    calls = tuple(
        replace(call, tool_calls=(f"a{seq}",), started_at=10.0 * seq, ended_at=10.0 * seq + 10)
        for seq, call in enumerate(made.transitions)
    )
    return replace(made, transitions=calls, tool_events=events, step_rewards=rewards)


def test_intermediate_blames_the_call_whose_tool_failed_and_nobody_else() -> None:
    failed = with_tool_rewards(three_calls(ToolEvent("search", "error", call_id="a1"), reward=1.0), {"error": -0.6})
    spread = Intermediate(weight=2.0)(Group("g", (failed, three_calls(reward=0.0))), centre)
    np.testing.assert_allclose(spread[0], np.array([0.5, 0.5, 0.5]) + 2 * (np.array([0.0, -0.6, 0.0]) + 0.1))
    np.testing.assert_allclose(spread[1], np.array([-0.5, -0.5, -0.5]) + 2 * 0.1)


def test_intermediate_is_found_by_name() -> None:
    assert plugins().credit("intermediate") == Intermediate()
