"""Model folders and weight files: the size, context, kind and chat templates of a model, checks before a server is started or
paused, and the reading in vLLM's worker.

The invariant: weights that pass `check_weights` have every tensor of the model folder with the same name and shape and all its
bytes, or name the tensor as left out on purpose. So a server that is paused for an update is never handed a file it cannot
load. Of a model's facts only JSON, safetensors headers and the template's text are read; a fact that the folder does not state
is None or empty, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.errors import PolicyServerError, import_extra

if TYPE_CHECKING:
    import torch

HASH_BYTES = 4 * 2**20
"""Bytes that are read at once to be hashed."""
LORA_A, LORA_B, ADAPTERS = "|lora_A", "|lora_B", "lightning.adapters"
"""In a file that holds only LoRA adapters: the suffixes of a matrix's name, and the metadata that say how to merge them."""
POLICIES = "policies"
"""The metadata key of a file with the adapters of several policies: a JSON object that maps each policy's name to the metadata
`ADAPTERS` of a file with its adapters alone. Names of tensors begin with the policy's name and `|`."""
ADAPTERS_OF_ALL = "adapters/policies.safetensors"
"""In the exported model of a run with several policies, the file with the adapters of all."""
CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that vLLM casts to the dtype it serves."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Torch's names of the dtypes of safetensors."""
_ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "BOOL",
)  # fmt: skip
"""The dtypes in the order in which `save_file` of safetensors writes tensors."""
LEFT_OUT = "left_out"
"""The metadata key of a weight file whose value, a JSON list, names the folder's tensors that the file does not replace."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One entry of a safetensors header; `dtype` is its name there, such as `F32` or `BF16`."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a safetensors file; only the header is read.

    Raises PolicyServerError when the file is missing, is something else, or is shorter or longer than its header says, and
    MissingExtraError when safetensors is not installed.
    """
    return _read(path)[0]


def read_metadata(path: Path) -> Mapping[str, str]:
    """Return the metadata of a safetensors file. Raises as `read_header` does."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, TensorSpec], Mapping[str, str]]:
    """Return a file's header and its metadata."""
    safetensors = import_extra("torch", "safetensors")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 — a safetensors handle is no mapping
            specs = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
            return specs, file.metadata() or {}
    except OSError as error:
        raise PolicyServerError(f"cannot read the weights {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise PolicyServerError(
            f"{path} is not a safetensors file, or was cut off: its header does not parse ({error})"
        ) from error


def hash_weights(path: Path) -> str:
    """Return the SHA-256 (hex) of the tensors' bytes in a safetensors file, without its header. The tensors are in the order of
    `save_file` (by dtype, then by name), wherever the file has them. Of a folder, return the SHA-256 of its files' names and
    digests.

    Raises PolicyServerError when a file cannot be read.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        for part in sorted(path.glob("*.safetensors")):
            digest.update(f"{part.name} {hash_weights(part)}\n".encode())
        return digest.hexdigest()
    try:
        with path.open("rb") as file:
            begins = 8 + struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(begins - 8))
            header.pop("__metadata__", None)
            for _, spec in sorted(header.items(), key=lambda item: (_ORDER.index(item[1]["dtype"]), item[0])):
                start, end = spec["data_offsets"]
                file.seek(begins + start)
                for place in range(start, end, HASH_BYTES):
                    digest.update(file.read(min(HASH_BYTES, end - place)))
    except (OSError, KeyError, ValueError, struct.error) as error:
        raise PolicyServerError(f"cannot read the weights {path}: {error}") from error
    return digest.hexdigest()


def check_model_folder(folder: Path) -> None:
    """Raise PolicyServerError unless `folder` holds what vLLM needs: config.json, a tokenizer and safetensors weights."""
    cure = "give the folder that `save_pretrained` of the model and of its tokenizer wrote"
    if not folder.is_dir():
        raise PolicyServerError(f"there is no model folder {folder}; {cure}")
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if not any(folder.glob("*.safetensors")):
        missing.append("weights (model.safetensors)")
    if (folder / "pytorch_model.bin").is_file() or (folder / "pytorch_model.bin.index.json").is_file():
        cure = (
            "its weights are in pytorch_model.bin, as pickles: load it with transformers and write it with `save_pretrained`, "
            "which makes safetensors"
        )
    if missing:
        raise PolicyServerError(f"{folder} is not a complete model folder, it lacks {', '.join(missing)}; {cure}")
    json_object(folder / "config.json")


def folder_tensors(folder: Path) -> dict[str, TensorSpec]:
    """Return every tensor of the folder's checkpoint, over all its shards."""
    return {name: spec for shard in checkpoint_files(folder) for name, spec in read_header(shard).items()}


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the folder's weights."""
    index = folder / INDEX
    if index.is_file():
        weight_map = json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise PolicyServerError(f"{index} has no weight_map; save the model again")
        return [folder / str(shard) for shard in sorted(set(weight_map.values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def check_weights(weights: Path, folder: Path) -> None:
    """Raise PolicyServerError unless `weights`, a safetensors file or a model's folder, can replace the weights of the model in
    `folder`. Adapters of several policies must each fit that model.

    With tied word embeddings a `lm_head.weight` may be present or absent on either side. Tensors that the file names as left
    out, such as a vision tower's, keep their values.
    """
    (have, metadata), want = (
        (folder_tensors(weights), {}) if weights.is_dir() else _read(weights),
        folder_tensors(folder),
    )
    if ADAPTERS in metadata:
        _check_adapters(str(weights), have, want)
        return
    if POLICIES in metadata:
        _check_policies(weights, json.loads(metadata[POLICIES]), have, want)
        return
    left_out = frozenset(json.loads(metadata.get(LEFT_OUT, "[]")))
    tied = bool(json_object(folder / "config.json").get("tie_word_embeddings"))
    heads = {name for name in (*have, *want) if tied and name.endswith("lm_head.weight")}
    if missing := sorted(want.keys() - have.keys() - heads - left_out):
        raise PolicyServerError(f"{weights} lacks {_some(missing)} of the model in {folder}; export the whole model")
    if extra := sorted(have.keys() - want.keys() - heads):
        raise PolicyServerError(f"{weights} has {_some(extra)}, which the model in {folder} does not have")
    for name, spec in have.items():
        wanted = want.get(name) or _embedding(want)
        if wanted is None or wanted.shape != spec.shape:
            shape = wanted.shape if wanted else "unknown"
            raise PolicyServerError(f"{weights}: {name!r} has shape {spec.shape}, the model in {folder} has {shape}")
        if wanted.dtype != spec.dtype and not {wanted.dtype, spec.dtype} <= CASTABLE:
            raise PolicyServerError(
                f"{weights}: {name!r} is {spec.dtype}, the model in {folder} has {wanted.dtype}, and that is not a cast"
            )


def _check_adapters(
    whose: str, have: Mapping[str, TensorSpec], want: Mapping[str, TensorSpec], cure: str = "export the whole model"
) -> None:
    names = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in have}
    for name in sorted(names):
        down, up, spec = have.get(name + LORA_A), have.get(name + LORA_B), want.get(name)
        if down is None or up is None or spec is None or spec.shape != (up.shape[0], down.shape[1]):
            raise PolicyServerError(f"{whose} has an adapter for {name!r} that the model does not fit: {cure}")


def _check_policies(
    weights: Path, policies: Mapping[str, object], have: Mapping[str, TensorSpec], want: Mapping[str, TensorSpec]
) -> None:
    parts: dict[str, dict[str, TensorSpec]] = {policy: {} for policy in policies}
    for name, spec in have.items():
        policy, _, matrix = name.partition("|")
        if policy not in parts:
            raise PolicyServerError(
                f"{weights} has the tensor {name!r}, which is of none of its policies: export them again"
            )
        parts[policy][matrix] = spec
    for policy, own in parts.items():
        if not own:
            raise PolicyServerError(f"{weights} has no adapters of the policy {policy!r}: export the policies again")
        cure = "train the policy from the model that the policy server was started with"
        _check_adapters(f"the policy {policy!r} in {weights}", own, want, cure)


def _embedding(tensors: Mapping[str, TensorSpec]) -> TensorSpec | None:
    """Return the spec of the embedding, which a tied lm_head must have; None if there is no embedding."""
    return next((spec for name, spec in tensors.items() if name.endswith("embed_tokens.weight")), None)


def json_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file of a model's folder. Raises PolicyServerError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyServerError(f"cannot read {path}: {error}; save the model again") from error
    if not isinstance(value, dict):
        raise PolicyServerError(f"{path} does not hold a JSON object; save the model again")
    return value


def _some(names: list[str]) -> str:
    """Name the first three of these tensors, and say how many more there are."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"


def weight_tensors(paths: Sequence[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of some weight files. For a file of adapters alone: those of its base model's folder, adapters
    merged."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            if told := (file.metadata() or {}).get(ADAPTERS):
                yield from _merged(file, json.loads(told))
                continue
            for name in file.keys():  # noqa: SIM118 — a safetensors handle is no mapping
                yield name, file.get_tensor(name)


def _merged(file: Any, told: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the folder that some adapters (arXiv 2106.09685) belong to, merged as the trainer merges them."""
    import torch

    kept, served = getattr(torch, told["base_dtype"]), getattr(torch, told["dtype"])
    for name, value in weight_tensors(checkpoint_files(Path(told["base"]))):
        scaling = told["scaling"].get(name)
        if scaling is None:
            yield name, value
            continue
        delta = (file.get_tensor(name + LORA_B) @ file.get_tensor(name + LORA_A)) * scaling
        yield name, (value.to(kept).to(delta.dtype) + delta).to(served)


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
        why_bfloat16="linear attention" if linear else "FP8 weights" if quantisation(folder).startswith("fp8") else "",
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


def quantisation(folder: Path) -> str:
    """Return the method by which a folder's weights are quantised, such as `fp8` or `gptq`; empty if they are not."""
    config = json_object(folder / "config.json")
    for place in (config, _text_part(config)):
        found = place.get("quantization_config") or place.get("compression_config")
        if found:
            method = str(found.get("quant_method", "unknown"))
            return method if method != "fp8" or found.get("weight_block_size") else "fp8 without blocks"
    return ""


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model."""
    return next((part for name in TEXT_PARTS if isinstance(part := config.get(name), dict)), config)


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
