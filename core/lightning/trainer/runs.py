"""A run's folder and identity: one trainer at a time, and a resume must be the same run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning.algorithms.prompts.protocol import PromptAlgorithm
from lightning.algorithms.protocol import Algorithm
from lightning.config import Config
from lightning.errors import ConfigError, LightningError
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.store.url import split_userinfo
from lightning.trainer.functions import holds_code, recorded
from lightning.types import DEFAULT_PROJECT, Json, Run

logger = logging.getLogger(__name__)

MAY_CHANGE = (
    "trainer.steps",
    "trainer.eval_every",
    "trainer.trackers",
    "trainer.keep_checkpoints",
    "trainer.checkpoint_every",
    "trainer.max_logprob_gap",
    "engine.device",
    "engine.threads",
    "engine.tokens_per_microbatch",
    "engine.step",
    "engine.gradient_checkpointing",
    "engine.verl.world_size",
    "engine.verl.nodes",
    "engine.verl.address",
    "engine.verl.restarts",
    "engine.verl.start_timeout",
    "policy_server.attach",
    "policy_server.host",
    "policy_server.port",
    "policy_server.start_timeout",
    "policy_server.kv_cache_bytes",
    "policy_server.gpu_memory_utilization",
    "policy_server.weight_transfer",
    "policy_server.transfer_timeout",
    "gateway.host",
    "gateway.port",
    "gateway.token_ttl",
    "gateway.hold_timeout",
    "gateway.upstream_timeout",
    "gateway.limits",
    "gateway.allowed_upstreams",
    "server",
    "runner.concurrency",
    "runner.lease_ttl",
    "runner.drain",
    "runner.preload",
    "runner.rollouts_per_process",
    "runner.sandbox",
    "runner.sandbox_files",
    "runner.sandbox_hidden",
    "runner.ray",
    "runner.k8s",
    "optimizer_model",
    "algorithm.arguments.optimizer",
    "algorithm.arguments.rounds",
    "algorithm.arguments.max_rollouts",
)
"""Settings that a resumed run may change: they decide where and how fast things run, not what is sampled or trained. The
engine's device does where its dtype is named; with `auto` a GPU computes in bfloat16 and a CPU in float32."""

ROUNDED_BY = (
    "engine.device",
    "engine.threads",
    "engine.tokens_per_microbatch",
    "engine.step",
    "engine.verl.world_size",
    "engine.verl.nodes",
)
"""Those of them by which sums are taken in another order: a step that is replayed is then the same but for rounding."""

RUN_FILE = "run.json"


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Make the folder and hold it: a second trainer on it is refused. The lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to the run's folder {folder}: {error}. Give another `out`.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is training in {folder}: wait for it, or give another `out`") from error
        yield


def describe_algorithm(algorithm: Algorithm | PromptAlgorithm) -> dict[str, Json]:
    """An algorithm in JSON: its plugin name and, for a dataclass, its arguments.

    An argument that is a dataclass itself (a credit with other settings) says its `type` beside its fields, and one that is a
    function, or another object, what it is and whether it was edited (`lightning.trainer.functions`): then only Python code
    that has the object can derive its batches again. So do the `functions` of what `from_loss` and `from_batch` made.
    `arguments` is null for an algorithm that is no dataclass.
    """
    described: dict[str, Json] = {"name": algorithm.name, "type": type(algorithm).__qualname__, "arguments": None}
    if dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type):
        values = {item.name: getattr(algorithm, item.name) for item in dataclasses.fields(algorithm) if item.init}
        described["arguments"] = _json(values)
    own = getattr(algorithm, "own_functions", None)
    return described | ({"functions": _json(own)} if isinstance(own, Mapping) else {})


def _json(values: object) -> Json:
    """In JSON, or None for what cannot be: a mapping with keys that are no words, a list that holds itself."""
    try:
        found: Json = json.loads(json.dumps(values, default=recorded))
    except (TypeError, ValueError):
        return None
    return found


def run_id_of(folder: Path) -> str:
    """The id of the run in a folder: what its `run.json` says, or the folder's name while there is none.

    A folder can be renamed; the run in it keeps its id.
    """
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["id"])
    except FileNotFoundError:
        return folder.resolve().name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / RUN_FILE} cannot be read ({error}): restore it, or give another `out`") from error


def name_folder(folder: Path, run: str, store: str = "") -> None:
    """Write the run's id into its folder, once and whole, and where it is kept, when that is another place.

    `store` is a URL; its password is left out.
    """
    if (folder / RUN_FILE).exists():
        return
    unfinished = folder / f".{RUN_FILE}"
    user, bare = split_userinfo(store)
    name = user.partition(":")[0]
    named = bare.replace("://", f"://{name}@", 1) if name else bare
    unfinished.write_text(json.dumps({"id": run} | ({"store": named} if store else {})) + "\n")
    unfinished.replace(folder / RUN_FILE)


async def check_run(
    store: Store, run: str, described: Mapping[str, Json], *, resume: bool, project: str = DEFAULT_PROJECT
) -> Run:
    """The run to start or to go on with, of a project; nothing is written. With `resume` the stored one must be the same.

    `store` is that of all projects, in which an id names one run.
    """
    known = await store.get_run(run)
    if known is None:
        others = [other.id for other in await store.list_runs(project, brief=True)]
        if resume and others:
            raise ConfigError(
                f"there is no run {run!r} to resume in this store; it has {', '.join(others)}: give the `out` of one of them"
            )
        return Run(run, run, described, time.time(), project)
    if not resume:
        raise ConfigError(
            f"run {run!r} exists already: pass resume=True (--resume) to go on with it, or give another `out`"
        )
    if known.project != project:
        raise ConfigError(
            f"run {run!r} is of the project {known.project!r} and trainer.project is {project!r}: resume it with "
            f"--set trainer.project={known.project}, or give another `out` to start a new run"
        )
    changed = sorted(_differences(known.config, described))
    may_change = [name for name in MAY_CHANGE if name != "engine.device" or not _dtype_is_auto(described)]
    different = [name for name in changed if not _among(name, may_change)]
    if different:
        edited = any(name.startswith("algorithm.") and name.endswith(".sha256") for name in different)
        hint = " (sha256 is that of a function's source: it was edited)" if edited else ""
        raise ConfigError(
            f"run {run!r} was started with other settings ({', '.join(different)}){hint}: resume it with the same ones, "
            "or give another `out` to start a new run"
        )
    if rounded := [name for name in changed if _among(name, ROUNDED_BY)]:
        logger.warning(
            "run %s goes on with other settings (%s): steps are the same but for rounding, those that are replayed too",
            run,
            ", ".join(rounded),
        )
    return known


def _differences(stored: Mapping[str, Json], now: Mapping[str, Json]) -> Iterator[str]:
    """The settings that are not the stored run's. One that its release did not have yet was at its default then."""
    now = _as_described_then(now, stored)
    stored = _as_described_now(stored)
    defaults = _flatten({"config": Config().model_dump(mode="json")})
    old, new = _flatten(json.loads(json.dumps(stored))), _flatten(json.loads(json.dumps(now)))
    for key in old.keys() | new.keys():
        if key not in old and key.startswith("algorithm.") and key.endswith(".sha256"):
            continue  # that release did not note it; that it is another object altogether is told by its name
        if old.get(key, defaults.get(key)) != new.get(key):
            yield key.removeprefix("config.")


def _dtype_is_auto(described: Mapping[str, Json]) -> bool:
    return _flatten(described).get("config.engine.dtype") == "auto"


def _among(name: str, settings: Sequence[str]) -> bool:
    """Whether a setting is one of some settings, or of their sections."""
    return any(name == other or name.startswith(f"{other}.") for other in settings)


def _as_described_now(stored: Mapping[str, Json]) -> Mapping[str, Json]:
    """With the stored algorithm as this release describes it: made again from its arguments, the newer ones at their defaults.

    A step that it would take otherwise is found by its digest when it is replayed.
    """
    algorithm = stored.get("algorithm")
    if not isinstance(algorithm, Mapping) or algorithm.get("name") not in plugins().names("algorithms"):
        return stored
    arguments = algorithm.get("arguments")
    if not isinstance(arguments, Mapping):
        return stored
    objects = {name: value for name, value in arguments.items() if holds_code(value) or _has_type(value)}
    plain = {name: value for name, value in arguments.items() if name not in objects}
    try:
        now = describe_algorithm(plugins().algorithm(str(algorithm["name"]))(**plain))
    except (TypeError, LightningError):  # this release does not take them: the difference is told
        return stored
    made = now.pop("arguments")
    if now["type"] != algorithm.get("type") or not isinstance(made, Mapping):
        return stored
    if "functions" in algorithm:
        now["functions"] = algorithm["functions"]  # these are as they were then, which is what is asked
    else:
        now.pop("functions", None)
    return {**stored, "algorithm": {**now, "arguments": {**made, **objects}}}


def _has_type(value: Json) -> bool:
    return isinstance(value, Mapping) and "type" in value


def _as_described_then(now: Mapping[str, Json], stored: Mapping[str, Json]) -> Mapping[str, Json]:
    """Without what the stored run's release did not say: own functions, and any argument where one of them was a function."""
    algorithm, then = now.get("algorithm"), stored.get("algorithm")
    if not isinstance(algorithm, Mapping) or not isinstance(then, Mapping):
        return now
    known = {name: value for name, value in algorithm.items() if name != "functions" or name in then}
    if then.get("arguments") is None and holds_code(algorithm.get("arguments")):
        known["arguments"] = None
    return {**now, "algorithm": known}


def _flatten(value: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    flat: dict[str, Json] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat
