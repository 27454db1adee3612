"""The plugin that registers the torch engine; torch is imported only when an engine is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.errors import MissingExtraError
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.engines.protocol import Engine
    from lightning.engines.torch.engine import TorchEngine


@hookimpl
def register_engines(register: Callable[[str, Callable[[Config], Engine]], None]) -> None:
    """Register the engine `torch`."""
    register("torch", torch_engine)


def torch_engine(config: Config) -> TorchEngine:
    """Make a `TorchEngine` by the `engine` section of a configuration. Raises `MissingExtraError` if torch or transformers is
    not installed."""
    try:
        import transformers  # noqa: F401 — if it is missing, say so now and not in the middle of a run

        from lightning.engines.loading import served_length
        from lightning.engines.torch.engine import TorchEngine
    except ImportError as error:
        if (error.name or "").startswith("lightning"):
            raise
        raise MissingExtraError("torch", error.name or "") from error
    section = config.engine
    return TorchEngine(
        dtype=section.dtype,
        device=section.device,
        threads=section.threads,
        tokens_per_microbatch=section.tokens_per_microbatch,
        gradient_checkpointing=section.gradient_checkpointing,
        lora=section.lora,
        max_model_len=served_length(config.policy_server),
        step=section.step,
        max_nonfinite_steps=section.max_nonfinite_steps,
    )
