"""Credit assignment: the functions that turn the returns of a group's rollouts into an advantage for each call."""

from __future__ import annotations

from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.assign import Decayed, Discounted, identical, per_agent, returns_to_go, state_ids
from lightning.credit.critic import Critic
from lightning.credit.intermediate import Intermediate, ToolReward, call_rewards, check_tool_reward, with_tool_rewards
from lightning.credit.protocol import Credit, GroupAdvantage, Returns, group_returns, rollout_return
from lightning.credit.tree import Branched, GiGPO, LeaveOneOut
from lightning.credit.weighted import Weighted

__all__ = [
    "Branched",
    "Credit",
    "Critic",
    "Decayed",
    "Discounted",
    "GiGPO",
    "GroupAdvantage",
    "Intermediate",
    "LeaveOneOut",
    "Returns",
    "ToolReward",
    "Weighted",
    "all_equal",
    "call_rewards",
    "centre",
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
