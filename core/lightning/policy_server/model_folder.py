"""Model folders and weight files: checks before a server is started or paused, and the reading in vLLM's worker.

The invariant: weights that pass `check_weights` have every tensor of the model folder with the same name and shape and all its
bytes, or name the tensor as left out on purpose. So a server that is paused for an update is never handed a file it cannot
load.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.errors import PolicyServerError

if TYPE_CHECKING:
    import torch

HASH_BYTES = 4 * 2**20
"""Bytes that are read at once to be hashed."""
LORA_A, LORA_B, ADAPTERS = "|lora_A", "|lora_B", "lightning.adapters"
"""In a file that holds only LoRA adapters: the suffixes of a matrix's name, and the metadata that say how to merge them."""
CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that vLLM casts to the dtype it serves."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
INDEX = "model.safetensors.index.json"
LEFT_OUT = "left_out"
"""The metadata key of a weight file whose value, a JSON list, names the folder's tensors that the file does not replace."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One entry of a safetensors header; `dtype` is its name there, such as `F32` or `BF16`."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a safetensors file; only the header is read.

    Raises PolicyServerError when the file is missing, is something else, or is shorter or longer than its header says.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, TensorSpec], Mapping[str, str]]:
    """Return a file's header and its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 — a safetensors handle is no mapping
            specs = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
            return specs, file.metadata() or {}
    except OSError as error:
        raise PolicyServerError(f"cannot read the weights {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise PolicyServerError(
            f"{path} is not a safetensors file, or was cut off: its header does not parse ({error})"
        ) from error


def hash_weights(path: Path) -> str:
    """Return the SHA-256 (hex) of the tensors' bytes in a safetensors file, in their order there, without its header.

    Raises PolicyServerError when the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            file.seek(8 + struct.unpack("<Q", file.read(8))[0])
            while piece := file.read(HASH_BYTES):
                digest.update(piece)
    except (OSError, struct.error) as error:
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
    `folder`.

    With tied word embeddings a `lm_head.weight` may be present or absent on either side. Tensors that the file names as left
    out, such as a vision tower's, keep their values.
    """
    (have, metadata), want = (
        (folder_tensors(weights), {}) if weights.is_dir() else _read(weights),
        folder_tensors(folder),
    )
    if ADAPTERS in metadata:
        _check_adapters(weights, have, want)
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


def _check_adapters(weights: Path, have: Mapping[str, TensorSpec], want: Mapping[str, TensorSpec]) -> None:
    names = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in have}
    for name in sorted(names):
        down, up, spec = have.get(name + LORA_A), have.get(name + LORA_B), want.get(name)
        if down is None or up is None or spec is None or spec.shape != (up.shape[0], down.shape[1]):
            raise PolicyServerError(
                f"{weights} has an adapter for {name!r} that the model does not fit: export the whole model"
            )


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
