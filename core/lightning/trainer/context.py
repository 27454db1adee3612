"""How a step was computed: what its record says besides what was trained (`StepRecord.context`).

The invariant: two steps of one config epoch with the same numeric context, from the same weights and batch, give the same
weights bit for bit on a CPU; where the numeric context differs they are the same but for rounding.

Keys: `epoch`, the number of the config epoch · `weights`, SHA-256 (hex) of the weights that were served when the step was
taken, which are those of version `step` (of the adapters, where these were handed over alone; `base` for the model's own) ·
`base`, `base_digest` of the model's folder · `teacher`, where there is one: its `name` as it was asked for, its folder
(`model`) and that one's `base_digest` (`sha256`) · `own_loop`, where a loop of somebody's own took it: its updates
(`lightning.trainer.own_loop`) · `stages`, the plugins' stages that stood in a line: by what goes through it (`calls` of the
trainer's gateway; `attempts`, where they are made beside it; `steps`; `groups`, of which they are the sampler and the order of
tasks; `runs`, at whose beginning and end they stand), in their order, each with the version of its distribution · `added`,
what stages add to the step, by their names · and the numeric context, `NUMERIC`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Protocol, TypeGuard, runtime_checkable

from lightning.types import Json

NUMERIC: Final = ("dtype", "device", "threads", "tokens_per_microbatch", "path", "cpu", "versions")
"""Keys of the numeric context: the dtype that is computed in, where, by how many threads, trained tokens of a micro-batch, the
path taken (`tree` or `rows`), the CPU's vector instructions, and the versions of what computes."""

STAGES: Final = "stages"
"""The key of the stages."""
ADDED: Final = "added"
"""The key of what the stages of steps add."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PACKAGES = ("lightning", "torch", "transformers", "vllm")
_FLAGS = ("sse4_2", "avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def named_stages(stages: Mapping[str, Mapping[str, str]]) -> dict[str, Json]:
    """Stages as a step's context says them."""
    return {of: [[name, version] for name, version in each.items()] for of, each in stages.items()}


def stages_of(context: Mapping[str, Json]) -> dict[str, dict[str, str]]:
    """The stages that a step's context says, with their versions, by what goes through their line."""
    said = context.get(STAGES)
    lines = said.items() if isinstance(said, Mapping) else ()
    return {
        of: {str(each[0]): str(each[1]) for each in line if _is_pair(each)}
        for of, line in lines
        if isinstance(line, Sequence)
    }


def _is_pair(said: Json) -> TypeGuard[Sequence[Json]]:
    return isinstance(said, Sequence) and not isinstance(said, str) and len(said) == 2


def other_stages(context: Mapping[str, Json], now: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """How the stages of a later time differ from those that a step's context says, by what goes through their line: nothing
    for those that are the same, or that one of both does not say."""
    then = stages_of(context)
    differ = {of: _other(then[of], now[of]) for of in then if of in now}
    return {of: other for of, other in differ.items() if other}


def _other(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    told = [
        *(f"{name!r} ({then[name] or 'no version'}) is missing" for name in then if name not in now),
        *(f"{name!r} ({now[name] or 'no version'}) is new" for name in now if name not in then),
        *(f"{name!r} is {now[name]} and was {then[name]}" for name in then if name in now and now[name] != then[name]),
    ]
    both = [name for name in then if name in now], [name for name in now if name in then]
    return ", ".join(told) or ("their order is another" if both[0] != both[1] else "")


@runtime_checkable
class Numeric(Protocol):
    """An engine that says in what it computes; of one that does not, its settings are recorded."""

    def numerics(self) -> dict[str, Json]:
        """`dtype`, `device`, `threads` and `tokens_per_microbatch` as they are in effect."""


def numeric_context(engine: object, settings: Mapping[str, Json], metrics: Mapping[str, float]) -> dict[str, Json]:
    """The numeric context of a step. `settings` are those of the section `engine`, `metrics` the engine's own of that step."""
    named = {name: settings.get(name) for name in ("dtype", "device", "threads", "tokens_per_microbatch")}
    tree = metrics.get("tree")
    path: Json = settings.get("step") if tree is None else "tree" if tree else "rows"
    return named | (engine.numerics() if isinstance(engine, Numeric) else {}) | {"path": path} | machine()


@functools.cache
def machine() -> dict[str, Json]:
    """The part of the numeric context that is this machine's: `cpu` and `versions`."""
    return {"cpu": _cpu(), "versions": {name: found for name in _PACKAGES if (found := _version(name))}}


def _cpu() -> str:
    """The architecture and those of its vector instructions by which sums are taken in another order."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.machine()
    flags = next((set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), set())
    return " ".join([platform.machine(), *(flag for flag in _FLAGS if flag in flags)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def weight_files(model: Path) -> list[Path]:
    """The weight files of a model's folder, in the order of names."""
    return sorted({file for glob in _WEIGHTS for file in model.glob(glob)})


def base_digest(model: Path, cache: Path | None = None) -> str:
    """SHA-256 (hex) over the weight files of a model's folder: over each one's name and its own SHA-256, in the order of names.

    It takes about a second for a gigabyte. With `cache` it is kept in that file, and read from it while names, sizes and times
    of the files are the same. Raises `OSError` for files that cannot be read.
    """
    files = weight_files(model)
    stamp = json.dumps([[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
    if cache is not None and cache.is_file():
        with suppress(ValueError, KeyError, TypeError):  # a crash while it was written may leave half of it
            kept = json.loads(cache.read_text())
            if kept["files"] == stamp:
                return str(kept["sha256"])
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    found = digest.hexdigest()
    if cache is not None:
        cache.write_text(json.dumps({"files": stamp, "sha256": found}) + "\n")
    return found
