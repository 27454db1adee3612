"""The plugin `masks`: calls sampled with top-p, a grammar or another mask are trained as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.batch import SamplingMask
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.policy_server.vllm_arguments import ServerPart
    from lightning.types import Transition


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stage `masks`, which asks for masks and keeps them."""
    register("masks", made_later("lightning_masks.stage:MasksStage"))


@hookimpl
def register_masks(register: Callable[[str, Callable[[Transition], SamplingMask]], None]) -> None:
    """Register the reader of the extra `masks`."""
    register("masks", made_later("lightning_masks.extra:read"))


@hookimpl
def register_server_parts(register: Callable[[str, Callable[[], ServerPart]], None]) -> None:
    """Register the code that notes masks in vLLM's workers and sends them with answers."""
    register("masks", made_later("lightning_masks.codes:server_part"))
