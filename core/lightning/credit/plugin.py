"""Registers lightning's own credit functions; they come with the plugin `algorithms`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.credit.protocol import Credit


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Every credit of `lightning.credit` with its defaults; `identical` is LightningRL's default."""
    from lightning.credit.assign import Decayed, Discounted, identical, per_agent
    from lightning.credit.critic import Critic
    from lightning.credit.intermediate import Intermediate
    from lightning.credit.tree import GiGPO, LeaveOneOut

    register("identical", identical)
    register("decayed", Decayed())
    register("discounted", Discounted())
    register("per-agent", per_agent)
    register("leave-one-out", LeaveOneOut())
    register("gigpo", GiGPO())
    register("intermediate", Intermediate())
    register("critic", Critic())
