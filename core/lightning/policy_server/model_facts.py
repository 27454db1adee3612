"""Reads from a model folder the size, context, kind and chat templates of the model that vLLM is to serve.

The invariant: only JSON, safetensors headers and the template's text are read; a fact that the folder does not state is None or
empty, never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.policy_server.model_folder import folder_tensors, json_object

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Keys under which a multimodal model keeps the configuration of its language model."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U64": 8, "U32": 4, "U16": 2}
"""Bytes of a number, for the dtypes of safetensors that have more than one."""
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Entries of `layer_types` (`layers_block_type`) that keep keys and values for each token."""
CURE_OF_TEMPLATE = (
    "give vLLM a template that shows tools (policy_server.args: --chat-template FILE), take a model whose template knows them, "
    "or describe the tools in the agent's own prompt"
)


@dataclass(frozen=True, slots=True)
class GrowingPositions:
    """Rotary positions that are scaled for rows longer than `length`."""

    kind: Literal["longrope", "dynamic"]
    length: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of one model folder. `name` holds the folder's name and the configuration's name of the model."""

    name: str
    model_type: str
    parameters: int
    bytes: int
    """Bytes of the checkpoint's tensors."""
    kv_elements: int | None
    """How many numbers the KV cache keeps for a token: 2 x layers x key heads x their size (arXiv 2309.06180). With a latent of
    keys and values (arXiv 2405.04434): its rank plus the shared rotary key, for each layer. None if unknown."""
    context: int | None
    """`max_position_embeddings`, or the family's name for it, before any scaling. None if unknown."""
    plain_attention: bool
    """Whether every layer keeps keys and values of its own for each token: no latent, no state-space or linear layers."""
    why_bfloat16: str
    """The part of the model for which vLLM on a CPU needs bfloat16 instead of float32; empty if there is none."""
    template: str
    """All chat templates of the folder, one after another; empty without one."""
    vocabulary: str
    """The text of tokenizer.json; empty without one."""
    growing: GrowingPositions | None = None
    """How positions are scaled with the length of a row; None if they are not."""

    @property
    def knows_tools(self) -> bool:
        """Whether a chat template shows tools to the model."""
        return "tools" in self.template

    def has_token(self, token: str) -> bool:
        """Whether the tokenizer has this text as one token."""
        return json.dumps(token, ensure_ascii=False) in self.vocabulary


def read_facts(folder: Path) -> ModelFacts:
    """Read the facts of a complete model folder (see `check_model_folder`). Raises PolicyServerError if a file cannot be
    read."""
    config = json_object(folder / "config.json")
    text = _text_part(config)
    tensors = folder_tensors(folder).values()
    latent = isinstance(text.get("kv_lora_rank"), int)
    kinds = text.get("layer_types") or text.get("layers_block_type") or []
    other = [kind for kind in kinds if kind not in ATTENTION_LAYERS]
    linear = "linear_attention" in kinds or any(key.startswith("linear_") for key in text)
    states = bool(other) or linear or any("mamba" in key or key.startswith("ssm_") for key in text)
    tokenizer = folder / "tokenizer.json"
    return ModelFacts(
        name=" ".join(filter(None, (_name(folder), str(config.get("_name_or_path", ""))))),
        model_type=str(config.get("model_type", "")),
        parameters=sum(math.prod(spec.shape) for spec in tensors),
        bytes=sum(math.prod(spec.shape) * DTYPE_BYTES.get(spec.dtype, 1) for spec in tensors),
        kv_elements=_kv_elements(text, len(kinds) - len(other)),
        context=_integer(text, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
        plain_attention=not latent and not states,
        why_bfloat16="linear attention" if linear else "FP8 weights" if _is_fp8(config, text) else "",
        template="\n".join(_templates(folder)),
        vocabulary=tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else "",
        growing=growing_positions(folder),
    )


def growing_positions(folder: Path) -> GrowingPositions | None:
    """Return how a folder's model scales positions with length, by its `config.json`; None if it does not. Raises
    PolicyServerError for a file that cannot be read."""
    text = _text_part(json_object(folder / "config.json"))
    given = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(given, dict):
        return None
    for rope in [given, *(value for value in given.values() if isinstance(value, dict))]:
        kind = rope.get("rope_type", rope.get("type"))
        own = _integer(rope, "original_max_position_embeddings")
        whole = _integer(text, "max_position_embeddings", "n_positions")
        if kind in ("longrope", "su") and (
            length := own or _integer(text, "original_max_position_embeddings") or whole
        ):
            return GrowingPositions("longrope", length)
        if kind == "dynamic" and whole:
            return GrowingPositions("dynamic", whole)
    return None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model."""
    return next((part for name in TEXT_PARTS if isinstance(part := config.get(name), dict)), config)


def _is_fp8(*configs: Mapping[str, object]) -> bool:
    quantised = (config.get("quantization_config") for config in configs)
    return any(isinstance(own, dict) and own.get("quant_method") == "fp8" for own in quantised)


def _name(folder: Path) -> str:
    """Return the folder's name; for a folder of the hub's cache (`models--OWNER--NAME/snapshots/HASH`) the model's."""
    return next((part for part in folder.parts[-3:-1] if part.startswith("models--")), folder.name)


def _kv_elements(text: Mapping[str, object], attending: int) -> int | None:
    """Return `ModelFacts.kv_elements`, where `attending` layers have such a cache (0: all)."""
    layers = attending or _integer(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    rank, rotary = _integer(text, "kv_lora_rank"), _integer(text, "qk_rope_head_dim")
    if layers and rank and rotary:
        return layers * (rank + rotary)
    heads, hidden = _integer(text, "num_attention_heads", "n_head", "n_heads"), _integer(text, "hidden_size", "n_embd")
    size = _integer(text, "head_dim") or (hidden // heads if heads and hidden else None)
    key_heads = _integer(text, "num_key_value_heads") or heads
    return 2 * layers * key_heads * size if layers and key_heads and size else None


def _templates(folder: Path) -> Iterator[str]:
    """Return the chat templates of a folder, from each file where a tokenizer may keep them."""
    for file in (folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        if file.is_file():
            yield file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = folder / name
        found = json_object(file).get("chat_template") if file.is_file() else None
        for template in found if isinstance(found, list) else [found]:
            text = template.get("template") if isinstance(template, dict) else template
            if isinstance(text, str):
                yield text


def _integer(values: Mapping[str, object], *names: str) -> int | None:
    """Return the first of these values that is a positive integer; None if there is none."""
    return next((value for name in names if isinstance(value := values.get(name), int) and value > 0), None)
