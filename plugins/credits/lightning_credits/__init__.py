"""Credit functions beside those of the core: of trees, of agents and turns, of a critic, of a call's own rewards, weighted by a
group's success."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_credits.agent_turn import AgentTurn
    from lightning_credits.critic import Critic
    from lightning_credits.intermediate import Intermediate
    from lightning_credits.tree import Branched, GiGPO, LeaveOneOut
    from lightning_credits.weighted import Weighted

__all__ = ["AgentTurn", "Branched", "Critic", "GiGPO", "Intermediate", "LeaveOneOut", "Weighted"]

_HOMES = {
    "AgentTurn": "agent_turn",
    "Branched": "tree",
    "Critic": "critic",
    "GiGPO": "tree",
    "Intermediate": "intermediate",
    "LeaveOneOut": "tree",
    "Weighted": "weighted",
}


def __getattr__(name: str) -> object:
    """Import the module of a credit function when its name is first used: every command loads the plugin, and few use numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
