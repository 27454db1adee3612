"""The size of a model from its `config.json`: parameters, bytes of its KV cache, floating point operations.

The invariant: counts are exact for decoders of the Llama kind (attention with or without grouped heads, a gated feed-forward,
dense or a mixture of experts). A configuration that is of another kind or lacks a needed value is refused, not guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.errors import ConfigError, MissingExtraError
from lightning.safe_text import read_text

_QWEN3 = {
    # hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, tie_word_embeddings
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen/Qwen3-4B": (2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 12288, False),
    "Qwen/Qwen3-14B": (5120, 40, 40, 17408, False),
    "Qwen/Qwen3-32B": (5120, 64, 64, 25600, False),
}
KNOWN: Mapping[str, Mapping[str, object]] = {
    name: {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": intermediate, "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }
    for name, (hidden, layers, heads, intermediate, tied) in _QWEN3.items()
} | {
    "meta-llama/Llama-3.2-3B-Instruct": {
        "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
}  # fmt: skip
"""Models with the values of their `config.json` on the hub, so that planning for them needs no network."""
COUNTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` whose parameters the formulas count."""
OTHER = (
    "n_routed_experts", "n_shared_experts", "shared_expert_intermediate_size", "kv_lora_rank", "mlp_only_layers",
    "vision_config", "audio_config",
)  # fmt: skip
"""Keys of a configuration for parts that the formulas do not count."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a decoder. `intermediate` is the width of one feed-forward; a layer has `experts` of them, and a token uses
    `used`."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    experts: int = 1
    used: int = 1
    attention_bias: bool = False
    head_norms: bool = False

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an output layer that is not tied has as many."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self._attention + self.experts * self._feed_forward + self._router + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def computed(self) -> int:
        """Parameters of the matrices that a token is multiplied with: its experts and the output layer, without the
        embedding."""
        own = self._attention + self.used * self._feed_forward + self._router
        return self.layers * own + self.embedding

    @property
    def kv_elements(self) -> int:
        """Numbers that the KV cache stores for a token."""
        return 2 * self.layers * self.keys

    def adapters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank on all linear layers except the output layer: rank (in + out) for
        each."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return self.layers * rank * (attention + self.experts * 3 * (self.hidden + self.intermediate))

    @property
    def _attention(self) -> int:
        bias = self.queries + 2 * self.keys if self.attention_bias else 0
        norms = 2 * self.head_dim if self.head_norms else 0
        return 2 * self.hidden * (self.queries + self.keys) + bias + norms

    @property
    def _feed_forward(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0


def read_shape(model: str) -> Shape:
    """Read the shape of a model: a folder, a `config.json`, or a name on the hub, from which only that file is fetched.

    Raises `ConfigError` for a model that does not exist, or whose configuration lacks a needed value.
    """
    path = Path(model).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
    elif model in KNOWN:
        return shape_of(model, KNOWN[model])
    else:
        file = _from_hub(model)
    try:
        values = json.loads(read_text(file, ConfigError))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a model's configuration: {error}") from error
    return shape_of(model, values)


def shape_of(name: str, values: Mapping[str, Any]) -> Shape:
    """Return the shape that a configuration describes. Raises `ConfigError` that names missing values, or parts that cannot be
    counted."""
    _check_kind(name, values)
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in needed if not isinstance(values.get(key), int)]
    if missing:
        raise ConfigError(
            f"the configuration of {name} says nothing of {', '.join(missing)}: the planner knows decoders of the Llama kind"
        )
    heads, kind = values["num_attention_heads"], values["model_type"]
    experts = values.get("num_experts") or values.get("num_local_experts") or 1
    wide = values.get("moe_intermediate_size") if experts > 1 else None
    return Shape(
        name=name,
        hidden=values["hidden_size"],
        layers=values["num_hidden_layers"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or math.ceil(values["hidden_size"] / heads),
        intermediate=wide or values["intermediate_size"],
        vocabulary=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings", False)),
        experts=experts,
        used=values.get("num_experts_per_tok", 1) if experts > 1 else 1,
        attention_bias=bool(values.get("attention_bias", kind == "qwen2")),
        head_norms=kind.startswith("qwen3"),
    )


def _check_kind(name: str, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a model that the formulas would count wrongly."""
    kind = values.get("model_type")
    cure = "plan for a model of one of these kinds that is as large"
    if kind not in COUNTED:
        raise ConfigError(
            f"{name} has model_type {kind!r}, whose parameters the planner cannot count; it counts {', '.join(COUNTED)}: {cure}"
        )
    odd = [key for key in OTHER if values.get(key)]
    if any(layer not in ("full_attention", "sliding_attention") for layer in values.get("layer_types") or ()):
        odd.append("layer_types")
    if values.get("decoder_sparse_step", 1) != 1:
        odd.append("decoder_sparse_step")
    if odd:
        raise ConfigError(
            f"the configuration of {name} (model_type {kind!r}) has {', '.join(odd)}, which the planner cannot count; it "
            f"counts {', '.join(COUNTED)} with equal layers of plain attention: {cure}"
        )


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtraError("torch", "huggingface_hub") from error
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"no model {model!r}: there is no such folder here, and the hub did not give its config.json "
            f"({type(error).__name__}). Give a folder, a config.json, or one of {', '.join(KNOWN)}"
        ) from error
