"""Registers lightning's own ways to give a vLLM new weights, as a plugin: all of them are files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.policy_server.weights import WeightTransfer


@hookimpl
def register_weight_transfers(
    register: Callable[[str, Callable[[Config, object | None], WeightTransfer]], None],
) -> None:
    """Register `auto` (the default), `shared_memory` and `file`, which differ in the folder that `weights.WeightsFolder`
    chooses."""
    from lightning.policy_server.weights import FILES, FromDisk

    for name in FILES:
        register(name, lambda config, sender: FromDisk())
