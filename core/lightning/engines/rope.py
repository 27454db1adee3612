"""Rotary positions that `transformers` computes by the longest row it has seen, and vLLM by its `max_model_len`.

The invariant: one position has the same rotation in every row, and that is vLLM's, which chooses once. longrope (arXiv
2402.13753) has long factors for every position as soon as `max_model_len` exceeds the length before scaling, else short ones;
dynamic scaling ends with the length before scaling. An own vLLM whose length is not set is started with that length.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning.engines.loading import unwrapped
from lightning.errors import EngineError
from lightning.policy_server.model_facts import growing_positions
from lightning.policy_server.profiles import argument

if TYPE_CHECKING:
    from lightning.config.sections import PolicyServerConfig

UNKNOWN = 0
"""The `max_model_len` of a server that somebody else has started."""


def served_length(config: PolicyServerConfig) -> int | None:
    """The `max_model_len` of the server: None where an own one is to choose it, `UNKNOWN` where somebody else has chosen."""
    given = argument(config.args, "--max-model-len")
    if given:
        return int(given) if given.isdigit() else UNKNOWN
    return config.max_model_len or (UNKNOWN if config.attach else None)


def fix_positions(model: nn.Module, folder: Path, max_model_len: int | None) -> int | None:
    """Fix a model's frequencies as a vLLM of this `max_model_len` does (None: an own one whose length is not set); returns how
    many positions are served, None where nobody knows. Raises `EngineError` naming the setting where vLLM cannot be
    followed."""
    found = growing_positions(folder)
    if found is None:
        return max_model_len or None
    scaled = f"{folder} scales the positions behind {found.length:,} tokens ({found.kind})"
    if max_model_len == UNKNOWN:
        raise EngineError(
            f"{scaled}, which vLLM does by its max_model_len: set policy_server.max_model_len to that of the attached vLLM"
        )
    if max_model_len is None or max_model_len <= found.length:
        return found.length if max_model_len is None else max_model_len
    if found.kind == "dynamic":
        raise EngineError(
            f"{scaled}, by each row's own length, which vLLM does not: set policy_server.max_model_len to "
            f"{found.length} or less"
        )
    for module in unwrapped(model).modules():
        _take_long(module, found.length)
    return max_model_len


def _take_long(module: Any, length: int) -> None:
    """Give a rotary module its frequencies behind this length for every position; nothing happens to other modules."""
    kinds: dict[str | None, str] | str | None = getattr(module, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind != "longrope":
            continue
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix, which = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
        buffer = getattr(module, f"{prefix}inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=length + 1, **which)
        module.register_buffer(f"{prefix}inv_freq", long, persistent=False)
        module.rope_type = kinds | {layer: "default"} if isinstance(kinds, dict) else "default"  # which never changes
        kinds = module.rope_type
