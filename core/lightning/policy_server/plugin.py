"""The ways of new weights that come with lightning, as a plugin: all of them are files."""

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
    """`auto` (the default), `shared_memory` and `file`: where the files lie is for `weights.WeightsFolder` to choose."""
    from lightning.policy_server.weights import FILES, FromDisk

    for name in FILES:
        register(name, lambda config, sender: FromDisk())
