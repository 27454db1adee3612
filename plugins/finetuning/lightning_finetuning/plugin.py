"""The finetuning plugin: the algorithms DPO, SFT and distillation, and the run stage that finds a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm
    from lightning.config import Config
    from lightning.trainer.run_stages import RunStage


@hookimpl
def register_algorithms(register: Callable[[str, Callable[..., Algorithm]], None]) -> None:
    """Register the algorithms `dpo`, `sft` and `distill`."""
    from lightning_finetuning.distill import Distill
    from lightning_finetuning.dpo import DPO
    from lightning_finetuning.sft import SFT

    register("dpo", DPO)
    register("sft", SFT)
    register("distill", Distill)


@hookimpl
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """Register the run stage `teachers`."""
    from lightning_finetuning.teacher import Teachers

    register("teachers", lambda config: Teachers())
