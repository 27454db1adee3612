"""Credit functions beside those of the core: of trees, of a critic, of a call's own rewards, weighted by a group's success."""

from __future__ import annotations

from lightning_credits.critic import Critic
from lightning_credits.intermediate import Intermediate
from lightning_credits.tree import Branched, GiGPO, LeaveOneOut
from lightning_credits.weighted import Weighted

__all__ = ["Branched", "Critic", "GiGPO", "Intermediate", "LeaveOneOut", "Weighted"]
