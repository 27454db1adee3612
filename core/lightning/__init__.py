"""lightning: make an agent that already exists better by reinforcement learning.

Everything here is imported when it is first used, so that an agent's process pays only for what it needs.
"""

from __future__ import annotations

import importlib
import os.path
from typing import TYPE_CHECKING

from lightning._version import __version__

if TYPE_CHECKING:
    from lightning_command.agent import command
    from lightning_debug.judge import Judge
    from lightning_finetuning.distill import Distill
    from lightning_finetuning.dpo import DPO
    from lightning_finetuning.sft import SFT
    from lightning_prompts.apo import APO
    from lightning_session.session import Session

    from lightning.algorithms.lightning_rl import LightningRL
    from lightning.errors import LightningError, MissingExtraError
    from lightning.hooks import hookimpl
    from lightning.instrument import component, label, reject, reward, state, tool, untrained
    from lightning.trainer import Trainer
    from lightning.types import LLM, Caller, Rollout, StepState, Task, ToolEvent, Transition

__all__ = [
    "APO",
    "DPO",
    "LLM",
    "SFT",
    "Caller",
    "Distill",
    "Judge",
    "LightningError",
    "LightningRL",
    "MissingExtraError",
    "Rollout",
    "Session",
    "StepState",
    "Task",
    "ToolEvent",
    "Trainer",
    "Transition",
    "__version__",
    "command",
    "component",
    "hookimpl",
    "label",
    "reject",
    "reward",
    "state",
    "tool",
    "untrained",
]

_HOME = {
    "APO": "lightning_prompts.apo",
    "DPO": "lightning_finetuning.dpo",
    "LLM": "lightning.types",
    "SFT": "lightning_finetuning.sft",
    "Caller": "lightning.types",
    "Distill": "lightning_finetuning.distill",
    "Judge": "lightning_debug.judge",
    "LightningError": "lightning.errors",
    "LightningRL": "lightning.algorithms.lightning_rl",
    "MissingExtraError": "lightning.errors",
    "Rollout": "lightning.types",
    "Session": "lightning_session.session",
    "StepState": "lightning.types",
    "Task": "lightning.types",
    "ToolEvent": "lightning.types",
    "Trainer": "lightning.trainer",
    "Transition": "lightning.types",
    "command": "lightning_command.agent",
    "component": "lightning.instrument",
    "hookimpl": "lightning.hooks",
    "label": "lightning.instrument",
    "reject": "lightning.instrument",
    "reward": "lightning.instrument",
    "state": "lightning.instrument",
    "tool": "lightning.instrument",
    "untrained": "lightning.instrument",
}

_PYTORCH_LIGHTNING = (
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "fabric",
    "pytorch",
    "seed_everything",
)

if os.path.isdir(os.path.join(__path__[0], "pytorch")):  # noqa: PTH112, PTH118 — one look, and pathlib is not imported for it
    from lightning.installation import warn_of_pytorch_lightning

    warn_of_pytorch_lightning(__path__[0])


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        said = f"module 'lightning' has no attribute {name!r}"
        if name in _PYTORCH_LIGHTNING:
            from lightning.installation import PYTORCH_LIGHTNING_CURE

            said += f": PyTorch Lightning has, and this is another lightning. {PYTORCH_LIGHTNING_CURE}"
        raise AttributeError(said)
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        package = home.partition(".")[0]
        if error.name != package or package == "lightning":
            raise
        from lightning.errors import MissingExtraError

        raise MissingExtraError(package.removeprefix("lightning_"), package) from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
