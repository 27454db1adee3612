"""How a run's steps were computed: under which settings (config epochs), with which teacher, and what each step's record says
of that (`StepRecord.context`).

The invariant: the settings of a committed step never change; what a resume changes begins a new epoch behind the last committed
step. Two steps of one config epoch with the same numeric context, from the same weights and batch, give the same weights bit
for bit on a CPU; where the numeric context differs they are the same but for rounding.

Keys: `epoch`, the number of the config epoch · `weights`, SHA-256 (hex) of the weights that were served when the step was
taken, which are those of version `step` (of the adapters, where these were handed over alone; `base` for the model's own) ·
`base`, `base_digest` of the model's folder · `teacher`, where there is one: its `name` as it was asked for, its folder
(`model`) and that one's `base_digest` (`sha256`) · `stages`, the plugins' stages that stood in a line: by what goes through it
(`calls` of the trainer's gateway; `attempts`, where they are made beside it; `steps`; `groups`, of which they are the sampler
and the order of tasks; `runs`, at whose beginning and end they stand), in their order, each with the version of its
distribution · `added`, what stages add to the step, by their names · what a loop other than the trainer's says of how it took
the step · and the numeric context, `NUMERIC`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

from lightning.engines.protocol import Engine
from lightning.errors import ConfigError
from lightning.installation import version_of
from lightning.store.protocol import Store
from lightning.types import Json, Run

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
    """Return stages in the form in which a step's context has them, as pairs of name and version by line."""
    return {of: [[name, version] for name, version in each.items()] for of, each in stages.items()}


def stages_of(context: Mapping[str, Json]) -> dict[str, dict[str, str]]:
    """Read from a step's context the versions of the stages by name, by what goes through their line."""
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
    """Say in words how the stages of now differ from those in a step's context, by what goes through their line. Lines with
    the same stages are left out, and so are lines that only one of the two has."""
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
    return {"cpu": _cpu(), "versions": {name: found for name in _PACKAGES if (found := version_of(name))}}


def _cpu() -> str:
    """The architecture and those of its vector instructions by which sums are taken in another order."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.machine()
    flags = next((set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), set())
    return " ".join([platform.machine(), *(flag for flag in _FLAGS if flag in flags)])


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


PolicyFault: TypeAlias = float | Literal["mask", "exclude"]
"""See `trainer.policy_fault`."""

EPOCHS: Final = "epochs"
"""The key of a run's state that lists its epochs from 1 on: `first`, `at` and what in `config` is not as in the run's."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Settings from a step on. `config` has the keys of `Run.config`, `at` is Unix time; `first` may be a step that is yet
    to come, where a schedule of algorithms says so."""

    number: int
    first: int
    config: Mapping[str, Json]
    at: float = 0.0

    def setting(self, section: str, name: str) -> Json:
        """A setting of a section; None where the run has none, as one that no trainer began."""
        config = self.config.get("config")
        found = config.get(section) if isinstance(config, Mapping) else None
        return found.get(name) if isinstance(found, Mapping) else None

    @property
    def max_staleness(self) -> int | None:
        """`trainer.max_staleness`; None where there is none, and in a run that is trained on a record, whose versions are
        others."""
        if self.config.get("recorded"):
            return None
        bound = self.setting("trainer", "max_staleness")
        return bound if isinstance(bound, int) else None

    @property
    def max_reuse(self) -> int:
        """`trainer.max_reuse`; 0 where there is none."""
        limit = self.setting("trainer", "max_reuse")
        return limit if isinstance(limit, int) else 0

    @property
    def train_agents(self) -> tuple[str, ...]:
        """The globs of the agents that are trained; none trains all."""
        agents = self.config.get("train_agents", [])
        return tuple(map(str, agents)) if isinstance(agents, (list, tuple)) else ()

    @property
    def policy_fault(self) -> PolicyFault:
        """`trainer.policy_fault`: the reward of rollouts that the policy failed; "exclude" where there is none."""
        found = self.setting("trainer", "policy_fault")
        if found == "mask":
            return "mask"
        return float(found) if isinstance(found, (int, float)) else "exclude"


RESTING: Final = "resting"
"""The key of a step's context that lists the policies which the step did not train, because policies took turns."""


OVER: Final = "over"
"""The key of a run's state that is true from the end of its training until it is resumed."""


async def mark_over(store: Store, run: str, over: bool) -> None:
    """Write into the run's state that its training is over, or that it goes on."""
    if over or await is_over(store, run):
        await store.put_state(run, OVER, over, once=None)


async def is_over(store: Store, run: str) -> bool:
    """Whether a run has come to its end and no trainer has resumed it since."""
    return await store.get_state(run, OVER) is True


async def read_epochs(store: Store, run: Run) -> list[Epoch]:
    """The epochs of a run, in order; at least one."""
    kept = await store.get_state(run.id, EPOCHS)
    epochs = [Epoch(0, 1, run.config, run.created_at)]
    for item in kept if isinstance(kept, list) else ():
        first, at, changed = item["first"], item["at"], item["config"]
        epochs.append(Epoch(len(epochs), int(first), {**run.config, **changed}, float(at)))
    return epochs


async def keep_epochs(store: Store, run: Run, epochs: Sequence[Epoch]) -> None:
    """Write these epochs into the run's state. The first of them is the run's own configuration, which is not written again."""
    if len(epochs) == 1 and await store.get_state(run.id, EPOCHS) is None:
        return
    listed: list[Json] = [
        {
            "first": epoch.first,
            "at": epoch.at,
            "config": {key: value for key, value in epoch.config.items() if value != run.config.get(key)},
        }
        for epoch in epochs[1:]
    ]
    await store.put_state(run.id, EPOCHS, listed)


def epoch_at(epochs: Sequence[Epoch], step: int) -> Epoch:
    """The epoch that a step belongs to."""
    return [epoch for epoch in epochs if epoch.first <= step][-1]


TEACHER: Final = "teacher"
"""The key of a step's context that names the teacher, and the folder in a run's own of teachers that were a run's step."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher: the `folder` of its model, the `name` by which the user asked for it, and the `base_digest` of the folder."""

    name: str
    folder: Path
    digest: str

    def described(self) -> dict[str, Json]:
        """Return the teacher in JSON, for the context of a step."""
        return {"name": self.name, "model": str(self.folder), "sha256": self.digest}


def reference_of(engine: Engine, teacher: Teacher | None) -> dict[str, Path]:
    """Return the arguments for the engine's `open` that give it a teacher; none without a teacher. Raises `ConfigError` for an
    engine whose `open` takes no teacher."""
    if teacher is None:
        return {}
    known = inspect.signature(engine.open).parameters.values()
    if not any(one.name == "reference" or one.kind is one.VAR_KEYWORD for one in known):
        raise ConfigError(
            f"the engine {type(engine).__name__} takes no teacher (its `open` has no `reference`), and the algorithm learns "
            f"from {teacher.name}: take another engine (the torch engine takes one), or another algorithm"
        )
    return {"reference": teacher.folder}
