"""The plugin that brings lightning's own algorithms and credit functions, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning.credit.plugin import register_credits
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm


@hookimpl
def register_algorithms(register: Callable[[str, Callable[..., Algorithm]], None]) -> None:
    """`lightning_rl`, and it with each low level under that one's own name."""
    from lightning.algorithms.lightning_rl import LightningRL

    register("lightning_rl", LightningRL)
    register("grpo", partial(LightningRL, low_level="grpo"))
    register("dr_grpo", partial(LightningRL, low_level="dr_grpo"))
    register("rloo", partial(LightningRL, low_level="rloo"))


__all__ = ["register_algorithms", "register_credits"]
