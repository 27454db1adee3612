"""The credits plugin: credit functions that compare calls in a tree, use a critic, add a call's rewards or weigh groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import Config, PluginSettings
    from lightning.credit import Credit
    from lightning.engines.protocol import Head


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings of the critic."""
    register("critic", later("lightning_credits.config:CriticConfig"))


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Register every credit of `lightning_credits` with its default arguments."""
    from lightning_credits import AgentTurn, Branched, Critic, GiGPO, Intermediate, LeaveOneOut, Weighted

    named: dict[str, Credit] = {
        "agent-turn": AgentTurn(),
        "leave-one-out": LeaveOneOut(),
        "gigpo": GiGPO(),
        "branch": Branched(),
        "intermediate": Intermediate(),
        "critic": Critic(),
        "weighted": Weighted(),
        "weighted-variance": Weighted(by="variance"),
    }
    for name, credit in named.items():
        register(name, credit)


@hookimpl
def register_heads(register: Callable[[str, Callable[[Config], Head]], None]) -> None:
    """Register the head `critic`."""
    register("critic", made_later("lightning_credits.value_head:critic_head"))
