"""Export of a model, with the tensors of its folder (trained, or carried over untouched): as a folder that `transformers` and
vLLM load, or as one file with all weights or adapters.

The invariant: the exported weights are those that the engine computes with, adapters merged, as safetensors under the names of
the folder that the model was loaded from; a tied output layer is written once, as the embedding. All else is copied from that
folder. Trained weights are stored with the folder's own names, shapes and FP8 blocks; a folder where this is impossible is
refused before anything is started. Tensors that `transformers` does not load (vision towers, MTP heads, old buffers) stay as
they are in the folder.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from lightning.engines.files import whole_file, whole_folder, write_tensors
from lightning.engines.loading import (
    WRAPPER,
    adapted_layers,
    add_adapters,
    beside_text,
    delta_of,
    factors,
    fix_positions,
    is_transposed,
    names_and_shapes,
    original_names,
    read_model,
    scaling_of,
    unwrapped,
)
from lightning.errors import ConfigError, EngineError
from lightning.policy_server.model_folder import (
    ADAPTERS,
    CASTABLE,
    INDEX,
    LEFT_OUT,
    LORA_A,
    LORA_B,
    TensorSpec,
    check_model_folder,
    checkpoint_files,
    folder_tensors,
    quantisation,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning.config import LoraConfig

FP8 = ("F8_E4M3", "F8_E5M2")
SCALE = "_scale_inv"
"""The suffix that fine-grained FP8 adds to a tensor's name for the scales of its blocks: value = stored value times scale."""
_FP8_MAX = 448.0
"""The largest finite value of float8_e4m3fn (arXiv 2209.05433)."""
_BITS = {"F32": 32, "F64": 64, "BF16": 16, "F16": 16}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
UNTRAINABLE = "train the checkpoint in bfloat16 or float32, which publishers offer beside it"


@dataclass(frozen=True, slots=True)
class Contents:
    """The names of a model folder's tensors: training replaces the tensors `trained`, and leaves the tensors `carried` as they
    are. `fp8` says whether some of the trained tensors are stored in FP8."""

    trained: tuple[str, ...]
    carried: tuple[str, ...]
    fp8: bool

    def remark(self) -> str:
        """Return the limits of training this folder, in words for the user; empty if there are none."""
        said = []
        if self.carried:
            said.append(
                f"{len(self.carried)} tensors are not trained and are carried over untouched: {_kinds(self.carried)}."
            )
        if self.fp8:
            said.append(
                "The weights are FP8: they are trained in the engine's dtype and rounded into the folder's blocks for every "
                "update. A change of less than 3 % of a weight does not reach the policy server; in bfloat16 it is 0.2 %."
            )
        return " ".join(said)


def contents(folder: Path, *, lora: LoraConfig | None = None, max_model_len: int | None = None) -> Contents:
    """Compare a folder's model, loaded by `transformers` on the device `meta`, with the headers of the folder's files. Try the
    adapters `lora` (None: no adapters) and the policy server's `max_model_len` (`engines.loading`) on the model.

    Raises `ConfigError`, naming the first tensors, if trained weights cannot be written back into the folder, and for a
    quantisation that cannot be trained; `EngineError` and `PolicyServerError` for a folder that cannot be read.
    """
    check_model_folder(folder)
    stored = folder_tensors(folder)
    _refuse_quantised(folder)
    _refuse_scales(folder, stored)
    model = read_model(folder, device_map="meta")
    trained = as_named(stored, names_and_shapes(model))
    unknown = sorted(name for name, shape in trained.items() if name not in stored or stored[name].shape != shape)
    if unknown:
        raise ConfigError(
            f"the trained weights cannot be written back into {folder}: {len(unknown)} tensors of the model that would be "
            f"trained are not in the folder under the same name with the same shape ({_some(unknown)}). Load the model once "
            "with transformers and save it (AutoModelForCausalLM.from_pretrained, save_pretrained; the tokenizer alike), and "
            "train the saved folder"
        )
    fix_positions(model, folder, max_model_len)
    if lora is not None:
        add_adapters(model, lora)
    written = with_scales(trained, stored)
    carried = stored.keys() - set(written) - tied_heads(written, stored).keys()
    return Contents(written, tuple(sorted(carried)), any(stored[name].dtype in FP8 for name in trained))


def as_named(stored: Iterable[str], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights by the names in the folder: GPT-2's checkpoints lack the prefix of the trunk that `transformers`
    writes."""
    known = set(stored)
    named = {}
    for name, value in weights.items():
        bare = name.partition(".")[2]
        named[bare if name not in known and bare in known else name] = value
    return named


def as_stored(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained weights as the folder stores them: under its names and in `dtype`. A tensor that the folder stores
    wider than its others keeps its dtype; a tensor in FP8 is put into the folder's blocks, together with their scales.

    Raises `EngineError` for a name that the folder lacks, except that of a tied output layer, which is left out.
    """
    stored = folder_tensors(folder)
    main = min((_BITS[spec.dtype] for spec in stored.values() if spec.dtype in _BITS), default=0)
    for given, tensor in weights:
        ((name, _),) = as_named(stored, {given: tensor}).items()
        spec = stored.get(name)
        if spec is None and name.endswith("lm_head.weight"):
            continue
        if spec is None:
            raise EngineError(
                f"{name!r} was trained, but {folder} has no tensor of that name to replace: please report this"
            )
        if spec.dtype in FP8:
            values, scales = in_blocks(tensor, dict(tensors_of(folder, [name + SCALE]))[name + SCALE])
            yield name, values
            yield name + SCALE, scales
        elif not tensor.is_floating_point() or _BITS.get(spec.dtype, 0) > main > 0:
            yield name, tensor
        else:
            yield name, tensor.to(dtype)


def in_blocks(tensor: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix (R, C) in FP8 and the scales (r, c) of its blocks. A block keeps its old scale from `scale` if its values
    fit, so that a weight that did not change is stored as before."""
    import torch

    rows, columns = scale.shape
    blocks = tensor.float().reshape(rows, tensor.shape[0] // rows, columns, -1)
    old, least = scale.float(), blocks.abs().amax((1, 3)) / _FP8_MAX
    new = torch.where(least > old * (1 + 1e-5), least, old).to(scale.dtype)
    values = (blocks / new.float()[:, None, :, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return values.reshape(tensor.shape), new


def with_scales(trained: Iterable[str], stored: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Return the trained names, and the names of their scales that the folder stores."""
    return tuple(sorted(key for name in trained for key in (name, name + SCALE) if key == name or key in stored))


def tied_heads(trained: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Return the name of the output layer, with the name of the embedding, if the folder stores an output layer that is tied to
    the embedding; empty if it stores none."""
    known = set(trained)
    embedding = next((name for name in sorted(known) if name.endswith(_EMBEDDINGS)), "")
    return {name: embedding for name in stored if embedding and name not in known and name.endswith("lm_head.weight")}


def tensors_of(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of a folder as they are stored, each with its name."""
    from safetensors import safe_open

    wanted = set(names)
    for file in checkpoint_files(folder):
        with safe_open(file, framework="pt", device="cpu") as handle:
            for name in sorted(wanted.intersection(handle.keys())):
                yield name, handle.get_tensor(name)


def _refuse_quantised(folder: Path) -> None:
    method = quantisation(folder)
    if method not in ("", "fp8"):
        raise ConfigError(f"the weights in {folder} are quantised ({method}), and cannot be trained: {UNTRAINABLE}")


def _refuse_scales(folder: Path, stored: Mapping[str, TensorSpec]) -> None:
    """Raise `ConfigError` for a matrix in FP8 without scales of whole blocks, because it could not be stored again."""
    for name, spec in stored.items():
        scale = stored.get(name + SCALE)
        if spec.dtype not in FP8 or (
            spec.dtype == FP8[0]
            and scale is not None
            and scale.dtype in _BITS
            and len(spec.shape) == len(scale.shape) == 2
            and all(size % blocks == 0 for size, blocks in zip(spec.shape, scale.shape, strict=True))
        ):
            continue
        raise ConfigError(
            f"{name!r} in {folder} is {spec.dtype} without scales of whole blocks ({name + SCALE!r}), and could not be stored "
            f"again after training: {UNTRAINABLE}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3])


def _kinds(names: Iterable[str]) -> str:
    """Return, for messages, the four most frequent two-part prefixes of the names, each with its count."""
    counts = Counter(".".join(name.split(".")[:2]) for name in names)
    shown = [f"{kind}.* ({count})" for kind, count in counts.most_common(4)]
    return ", ".join(shown) + (", ..." if len(counts) > len(shown) else "")


WEIGHTS = "model.safetensors"
TEMPLATES = "additional_chat_templates"
"""The folder into which a tokenizer's `save_pretrained` writes named chat templates, such as the one for tools."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")


def write_file(source: Path, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, file: Path) -> Path:
    """Write the trained weights of a model from the folder `source` as one safetensors file, atomically, in `dtype`, one tensor
    at a time. The file's metadata lists the folder's tensors that the file leaves out."""
    stored = folder_tensors(source)

    def about(written: Mapping[str, int]) -> dict[str, str]:
        left = sorted(stored.keys() - written.keys())
        return {"format": "pt"} | ({LEFT_OUT: json.dumps(left)} if left else {})

    with whole_file(file) as path:
        write_tensors(path, as_stored(source, weights, dtype), stored, about)
    return file


def write_adapters(
    source: Path,
    model: nn.Module,
    dtype: torch.dtype,
    file: Path,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    wanted: bool = True,
) -> Path | None:
    """Write a model's adapters alone as one safetensors file, atomically: A (rank, in) and B (out, rank) under the names of the
    matrices in `source` that they change. The metadata holds what is needed to merge them (base folder, dtypes, scaling).
    `whole` and `wanted` are those of `whole_weights`; the file is written where it is wanted.

    Returns the file. Returns None, and writes nothing, if `source` has one of these matrices under another name, transposed,
    fused with others or in FP8.
    """
    stored, kept = folder_tensors(source), ""
    tensors: dict[str, torch.Tensor] = {}
    scaling: dict[str, float] = {}
    for name, layer in adapted_layers(model).items():
        down, up = factors(layer)
        spec, base = stored.get(name), layer.get_base_layer().weight
        shape = (up.shape[0], down.shape[1])
        if is_transposed(layer) or spec is None or spec.dtype not in CASTABLE:
            return None  # the shape would not show a transposed square matrix
        if spec.shape != shape or tuple(base.shape) != shape:
            return None
        for kind, factor in ((LORA_A, down), (LORA_B, up)):
            gathered = whole(factor.detach())
            if wanted:
                tensors[name + kind] = gathered.cpu().contiguous()
        scaling[name] = scaling_of(layer)
        kept = str(base.dtype).removeprefix("torch.")
    told = {
        "base": str(source.resolve()),
        "base_dtype": kept,
        "dtype": str(dtype).removeprefix("torch."),
        "scaling": scaling,
    }
    if wanted:
        with whole_file(file) as path:
            save_file(tensors, path, metadata={"format": "pt", ADAPTERS: json.dumps(told)})
    return file


def write_folder(source: Path, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, folder: Path) -> Path:
    """Write a model folder, atomically: a copy of `source` with these weights, in `dtype`, in the place of its own, one tensor
    at a time.

    Other tensors and files of `source` are copied unchanged; the only subfolder that is copied is `TEMPLATES`. In `config.json`
    only the dtype is changed, if it differs.
    """
    stored = folder_tensors(source)
    with whole_folder(folder) as path:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, path / file.name)
        for template in (source / TEMPLATES).glob("*.jinja"):
            (path / TEMPLATES).mkdir(exist_ok=True)
            shutil.copyfile(template, path / TEMPLATES / template.name)
        _set_dtype(path / "config.json", str(dtype).removeprefix("torch."))
        trained = write_tensors(path / WEIGHTS, _with_heads(as_stored(source, weights, dtype), stored), stored)
        if carried := stored.keys() - trained.keys():
            files = [f"model-{part:05}-of-00002.safetensors" for part in (1, 2)]
            (path / WEIGHTS).rename(path / files[0])
            parts = [trained, write_tensors(path / files[1], tensors_of(source, carried), stored)]
            places = {key: name for name, part in zip(files, parts, strict=True) for key in part}
            index = {"metadata": {"total_size": sum(size for part in parts for size in part.values())}}
            told = json.dumps({**index, "weight_map": dict(sorted(places.items()))}, indent=2)
            (path / INDEX).write_text(told + "\n")
    return folder


def _with_heads(
    weights: Iterable[tuple[str, torch.Tensor]], stored: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, and last the output layer where the folder stores one that is tied to the embedding."""
    seen = set[str]()
    embeddings: dict[str, torch.Tensor] = {}
    has_head = any(name.endswith("lm_head.weight") for name in stored)
    for name, tensor in weights:
        seen.add(name)
        if has_head and name.endswith(_EMBEDDINGS):
            embeddings[name] = tensor
        yield name, tensor
    for head, embedding in tied_heads(seen, stored).items():
        yield head, embeddings[embedding]


def _set_dtype(file: Path, dtype: str) -> None:
    """Set the dtype of the weights in a `config.json`, also in its `text_config` if the `text_config` has a dtype. A file that
    already names this dtype is not written."""
    config = json.loads(file.read_bytes())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    places = [config, *(part for part in [config.get("text_config")] if isinstance(part, dict) and key in part)]
    if any(place.get(key) != dtype for place in places):
        for place in places:
            place[key] = dtype
        file.write_text(json.dumps(config, indent=2) + "\n")


def whole_weights(
    model: nn.Module,
    dtype: torch.dtype,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    wanted: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the text model on the CPU, matrices in `dtype`, in an order that all ranks share. It is done a
    layer at a time, so that there are never more copies than of one layer. A tensor may be the model's own, which the next step
    changes.

    `whole` gathers a sharded tensor; then all ranks must exhaust the iterator, also after an error, and ranks with `wanted`
    false get nothing. Adapters (arXiv 2106.09685) are merged layer by layer, so that there is never a second model in memory.
    """
    adapted, base = adapted_layers(model), unwrapped(model)
    found: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    beside, last = beside_text(model), ""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in beside:
            continue
        key = name.removeprefix(WRAPPER).replace(".base_layer.", ".")
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if key not in adapted and local.numel() and local.data_ptr() in written:
            continue
        written.add(local.data_ptr())
        layer = _layer_of(key)
        if layer != last:
            yield from original_names(base, found).items()
            found, last = {}, layer
        value = whole(tensor.detach())
        if key in adapted:
            delta = delta_of(adapted[key], whole)
            value = value.to(delta.dtype) + delta
        if wanted:
            # Vectors are small, and the folder may store some of them wider: `as_stored` decides their dtype.
            narrow = value.is_floating_point() and value.ndim > 1
            found[key] = (value.to(dtype) if narrow else value).cpu().contiguous()
    yield from original_names(base, found).items()


def _layer_of(name: str) -> str:
    """Return a tensor's name up to its first number, which is its layer's; the whole name if it has none. A family's layout in
    files never mixes tensors of several layers."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
