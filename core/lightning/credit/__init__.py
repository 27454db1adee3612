"""Trajectory credit: how a rollout's return is spread over its calls."""

from __future__ import annotations

from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.assign import Discounted, identical
from lightning.credit.protocol import Credit, GroupAdvantage, Returns, group_returns, rollout_return

__all__ = [
    "Credit",
    "Discounted",
    "GroupAdvantage",
    "Returns",
    "all_equal",
    "centre",
    "group_returns",
    "grpo",
    "identical",
    "rloo",
    "rollout_return",
]
