"""DPO and SFT, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm


@hookimpl
def register_algorithms(register: Callable[[str, Callable[..., Algorithm]], None]) -> None:
    """`dpo` and `sft`."""
    from lightning_finetuning.dpo import DPO
    from lightning_finetuning.sft import SFT

    register("dpo", DPO)
    register("sft", SFT)
