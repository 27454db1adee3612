"""The credits plugin: credit functions that compare calls in a tree, use a critic, add a call's rewards or weigh groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.credit import Credit
    from lightning.engines.protocol import Head


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Register every credit of `lightning_credits` with its default arguments."""
    from lightning_credits import Branched, Critic, GiGPO, Intermediate, LeaveOneOut, Weighted

    register("leave-one-out", LeaveOneOut())
    register("gigpo", GiGPO())
    register("branch", Branched())
    register("intermediate", Intermediate())
    register("critic", Critic())
    register("weighted", Weighted())
    register("weighted-variance", Weighted(by="variance"))


@hookimpl
def register_heads(register: Callable[[str, Callable[[Config], Head]], None]) -> None:
    """Register the head `critic`."""
    register("critic", made_later("lightning_credits.value_head:critic_head"))
