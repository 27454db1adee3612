"""Trajectory credit: how a rollout's return is spread over its calls."""

from __future__ import annotations

from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.assign import Discounted, identical
from lightning.credit.intermediate import Intermediate, ToolReward, call_rewards, with_tool_rewards
from lightning.credit.protocol import Credit, GroupAdvantage, Returns, group_returns, rollout_return

__all__ = [
    "Credit",
    "Discounted",
    "GroupAdvantage",
    "Intermediate",
    "Returns",
    "ToolReward",
    "all_equal",
    "call_rewards",
    "centre",
    "group_returns",
    "grpo",
    "identical",
    "rloo",
    "rollout_return",
    "with_tool_rewards",
]
