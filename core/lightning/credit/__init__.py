"""Credit assignment: the functions that turn the returns of a group's rollouts into an advantage for each call."""

from __future__ import annotations

from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.assign import Decayed, Discounted, check_discount, identical, per_agent, returns_to_go, state_ids
from lightning.credit.intermediate import ToolReward, call_rewards, check_tool_reward, with_tool_rewards
from lightning.credit.protocol import Credit, GroupAdvantage, Returns, group_returns, rollout_return

__all__ = [
    "Credit",
    "Decayed",
    "Discounted",
    "GroupAdvantage",
    "Returns",
    "ToolReward",
    "all_equal",
    "call_rewards",
    "centre",
    "check_discount",
    "check_tool_reward",
    "group_returns",
    "grpo",
    "identical",
    "per_agent",
    "returns_to_go",
    "rloo",
    "rollout_return",
    "state_ids",
    "with_tool_rewards",
]
