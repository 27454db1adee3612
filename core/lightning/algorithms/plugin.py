"""The plugin that registers lightning's own algorithms and credit functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm
    from lightning.credit.protocol import Credit


@hookimpl
def register_algorithms(register: Callable[[str, Callable[..., Algorithm]], None]) -> None:
    """Register LightningRL as `lightning_rl`, and once more for each low level under the name of that level, such as `grpo`."""
    from lightning.algorithms.lightning_rl import LightningRL
    from lightning.algorithms.presets import PRESETS

    register("lightning_rl", LightningRL)
    for low_level in PRESETS:
        register(low_level, partial(LightningRL, low_level=low_level))


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Register every credit of `lightning.credit` with its default arguments; LightningRL's default is `identical`."""
    from lightning.credit.assign import Decayed, Discounted, identical, per_agent

    register("identical", identical)
    register("decayed", Decayed())
    register("discounted", Discounted())
    register("per-agent", per_agent)
