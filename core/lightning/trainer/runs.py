"""A run's folder and identity: one trainer at a time, and what a resume changes is recorded.

The invariant: the record has the settings of each committed step, and its algorithm can be made again from the record if JSON
has words for the algorithm. A function or object for which JSON has no word is recorded by its name and the digest of its own
source; the digest does not cover code that the function calls, nor values that it closes over or reads from its module.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import fcntl
import hashlib
import inspect
import itertools
import json
import logging
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from tokenize import TokenError
from types import CodeType
from typing import Any, cast

import numpy as np

from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
from lightning.config import recorded_config
from lightning.config.plugin_settings import keys_of_run, keys_of_training_state
from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.plugins import plugins
from lightning.store.places import DATABASE, RUN_FILE, store_in
from lightning.store.protocol import Store
from lightning.store.url import split_userinfo, sqlite_url
from lightning.trainer.context import Epoch, base_digest, epoch_at, read_epochs
from lightning.types import DEFAULT_PROJECT, Json, Run, StepRecord

log = logging.getLogger(__name__)

AGENT = "agent"
"""Where a run's state, or its configuration, names its agent as MODULE:FUNCTION."""
LOCK = ".lock"
"""The file in a run's folder that its trainer holds."""
SEARCH_MAY_CHANGE = ("algorithm.arguments.optimizer", "algorithm.arguments.rounds", "algorithm.arguments.max_rollouts")
"""The settings of its algorithm that a resumed search for prompts may change. The names of its rollouts follow from its other
settings."""


class FolderHeldError(ConfigError):
    """Another process holds a run's folder."""


def folders_beside(out: Path) -> Iterator[Path]:
    """Yield `out`, then the folders beside it in which further runs begin: `out-2`, `out-3`, ..."""
    yield out
    named = out if out.name not in ("", "..") else out.resolve()
    yield from (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Make the folder and hold its lock inside the block. The lock ends with the process, however the process ends. Raises
    `FolderHeldError` if another process holds the lock, and `ConfigError` if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to the run's folder {folder}: {error}. Give another `out`.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FolderHeldError(
                f"another process is training in {folder}: wait for it, or give another `out`"
            ) from error
        yield


def is_claimed(folder: Path) -> bool:
    """Whether a process of this machine holds a run's folder, so that its trainer is alive. Nothing is written."""
    try:
        lock = (folder / LOCK).open()
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def describe_algorithm(algorithm: Algorithm | SearchAlgorithm) -> dict[str, Json]:
    """Return an algorithm in JSON: its registered name, its class and, for a dataclass, its arguments.

    An argument that is itself a dataclass (a credit with other settings) stands as its `type` and its fields. An argument that
    is a function or another object stands as its name and a digest of its source, or its `repr` (`recorded`); then only Python
    code that has the object can derive the algorithm's batches again. So it is with the functions given to `from_loss` and
    `from_batch`, which stand under `functions`. `arguments` is null for an algorithm that is no dataclass.
    """
    described: dict[str, Json] = {"name": algorithm.name, "type": type(algorithm).__qualname__, "arguments": None}
    if dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type):
        values = {item.name: getattr(algorithm, item.name) for item in dataclasses.fields(algorithm) if item.init}
        described["arguments"] = _json(values)
    own = getattr(algorithm, "own_functions", None)
    return described | ({"functions": _json(own)} if isinstance(own, Mapping) else {})


def rebuild_algorithm(config: Mapping[str, Json]) -> Algorithm | None:
    """Return the algorithm of a recorded configuration. Return None for a search algorithm, and if only the user's own code can
    make the algorithm again. Raises `ConfigError` if the algorithm no longer takes the recorded arguments."""
    described = config.get("algorithm")
    if not isinstance(described, Mapping) or not isinstance(described.get("arguments"), Mapping):
        return None
    name, arguments = described.get("name"), described.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, Mapping) or name not in plugins().names("algorithms"):
        return None
    try:
        algorithm = plugins().algorithm(name)(**{key: _made_again(value) for key, value in arguments.items()})
    except LookupError:
        return None
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"the algorithm {name!r} no longer takes the recorded arguments: {error}") from error
    if isinstance(algorithm, SearchAlgorithm):
        return None  # it trained nothing
    # A user's subclass may bear the name of what it extends.
    return algorithm if type(algorithm).__qualname__ == described.get("type") else None


def _made_again(value: Json) -> object:
    """Return an argument from a run's record: a registered credit with the recorded settings, a correction, or the value
    itself.

    Raises `LookupError` for an object of a type that no registered credit has, and for a function.
    """
    if holds_code(value):
        raise LookupError("only the user's own code has a function")
    if not isinstance(value, Mapping) or "type" not in value:
        return value
    if value["type"] == type_name(NO_CORRECTION):
        settings: dict[str, Any] = {key: item for key, item in value.items() if key != "type"}
        return Correction(**settings)
    for name in plugins().names("credits"):
        credit = plugins().credit(name)
        if dataclasses.is_dataclass(credit) and not isinstance(credit, type) and type_name(credit) == value["type"]:
            fields = {key: _made_again(item) for key, item in value.items() if key not in ("type", "sha256")}
            return dataclasses.replace(credit, **fields)
    raise LookupError(f"no registered credit is a {value['type']}")


def _json(values: object) -> Json:
    """Return values in JSON; None for values that JSON cannot hold: a mapping with keys that are no texts, a list that contains
    itself."""
    try:
        found: Json = json.loads(json.dumps(values, default=recorded))
    except (TypeError, ValueError):
        return None
    return found


async def agent_of(store: Store, run: Run) -> str:
    """Return the agent of a run as MODULE:FUNCTION; empty if the agent has no name of this form, or if it is not recorded."""
    return str(run.config.get(AGENT) or await store.get_state(run.id, AGENT) or "")


def name_folder(folder: Path, run: str, store: str = "") -> None:
    """Write the run's id into its folder, atomically, unless the folder has an id.

    `store` is the URL of the store that keeps the run, if this store is not in the folder; the URL is written, too, without its
    password.
    """
    if (folder / RUN_FILE).exists():
        return
    unfinished = folder / f".{RUN_FILE}"
    unfinished.write_text(json.dumps({"id": run} | ({"store": _without_password(store)} if store else {})) + "\n")
    unfinished.replace(folder / RUN_FILE)


def _without_password(store: str) -> str:
    user, bare = split_userinfo(store)
    name = user.partition(":")[0]
    return bare.replace("://", f"://{name}@", 1) if name else bare


def kept_elsewhere(folder: Path, store: str) -> str:
    """Return the URL of the store that keeps the run of a folder if it is not `store`, a URL as for `name_folder` (empty for
    the database in the folder). Empty if the folder has no run, or if `store` keeps it. Nothing is opened."""
    if not (folder / RUN_FILE).is_file():
        return ""
    named = store_in(folder)
    return "" if named == (_without_password(store) or sqlite_url((folder / DATABASE).resolve())) else named


async def check_run(
    store: Store,
    run: str,
    described: Mapping[str, Json],
    *,
    resume: bool,
    project: str = DEFAULT_PROJECT,
    searches: bool = False,
) -> Run:
    """Return the run of a project that is to be started or resumed; nothing is written. `store` is the store of all projects,
    in which an id names one run.

    A resumed run may change any setting (`plan_epochs`) but those with which its training state cannot be loaded
    (`not_loadable`): the model, the engine, LoRA; and those under which its calls were answered (`keys_of_run`). A resumed
    search for prompts (`searches`) must have the same tasks, seed and model, and of its algorithm it may change
    `SEARCH_MAY_CHANGE` alone.

    Raises `ConfigError` for another change, for a run that exists if `resume` is false, for a run of another project, and for
    an unknown run if `resume` is true and the project has other runs.
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
    now = (await read_epochs(store, known))[-1].config
    records = await store.steps(run)
    if kept := [name for name in differences(now, described) if _among(name, keys_of_run())]:
        begin = (
            f"begin a new run with its weights: --from {run}@{records[-1].step}" if records else "give another `out`"
        )
        raise ConfigError(
            f"the calls of run {run!r} were answered under other settings of {', '.join(kept)}: resume it with the recorded "
            f"ones, or {begin}"
        )
    if searches:
        asked = [name for name in differences(now, described) if _among(name, ("algorithm", "tasks", "seed", "model"))]
        if different := [name for name in asked if not _among(name, SEARCH_MAY_CHANGE)]:
            raise ConfigError(
                f"run {run!r} searches for prompts with other settings ({', '.join(different)}): resume it with the "
                "recorded ones, or give another `out` to start a new search"
            )
    elif records and (lost := await not_loadable(now, described, records)):
        raise ConfigError(
            f"the training state of run {run!r} does not fit other settings of {', '.join(lost)}: resume it with the "
            f"recorded ones, or begin a new run with its weights: --from {run}@{records[-1].step}"
        )
    return known


async def steps_taken(store: Store, run: Run) -> int:
    """Return how many steps of a run are committed."""
    last = await store.last_step(run.id)
    return 0 if last is None else last.step


async def why_not_go_on(
    store: Store,
    run: Run,
    described: Mapping[str, Json],
    phases: Sequence[tuple[int, Mapping[str, Json]]] = (),
) -> str:
    """Return why a start with the settings `described` does not go on with this run, in words that follow the run's folder:
    other settings. Empty if the settings are those of the run. `phases` are as in `plan_epochs`."""
    records = await store.steps(run.id, brief=True)
    begun = records[-1].step + 1 if records else 1
    planned = [(first, {**described, "algorithm": algorithm}) for first, algorithm in phases] or [(1, dict(described))]
    ahead = [each for place, each in enumerate(planned) if place + 1 == len(planned) or planned[place + 1][0] > begun]
    epochs = await read_epochs(store, run)
    for first, config in ahead:
        theirs = epoch_at(epochs, max(first, begun)).config
        kept = {name: theirs[name] for name in config if name in theirs}
        if found := differences(kept, config | {"head": config.get("head") or theirs.get("head", "")}):
            told = [f"{name} {_shown(old)} → {_shown(new)}" for name, (old, new) in found.items()]
            more = f" and {len(told) - 3} more" if len(told) > 3 else ""
            return f"holds a run with other settings ({', '.join(told[:3])}{more})"
    return ""


async def not_loadable(
    stored: Mapping[str, Json], described: Mapping[str, Json], records: Sequence[StepRecord]
) -> list[str]:
    """Return the changed settings with which the training state of the committed steps `records` cannot be loaded.

    A model's folder may have moved, so the contents of the folders are compared. A run may go on without the head that it had.
    """
    changed = differences(stored, described)
    lost = [name for name in changed if name == "engine" or _among(name, ("engine.lora", *keys_of_training_state()))]
    if "head" in changed and described["head"]:
        lost.append("head")
    if "model" in changed:
        base = records[-1].context.get("base") if records else None
        if base is None or base != await asyncio.to_thread(base_digest, Path(str(described["model"]))):
            lost.append("model")
    return lost


async def plan_epochs(
    store: Store, run: Run, described: Mapping[str, Json], phases: Sequence[tuple[int, Mapping[str, Json]]] = ()
) -> list[Epoch]:
    """Return all epochs of the run: the recorded epochs that have begun, then the planned epochs. Nothing is written.

    If `described` differs from the settings of the last recorded epoch, an epoch is planned, from the step after the last
    committed step on. `phases` are the phases of a schedule: the first step of each, and its algorithm in the form that
    `describe_algorithm` returns. Each phase that is not over begins an epoch of its own, unless its settings equal those of the
    epoch before; the epoch of a phase that has begun starts at the step after the last committed step, too.
    """
    records = await store.steps(run.id)
    begun = records[-1].step + 1 if records else 1
    epochs = [epoch for epoch in await read_epochs(store, run) if epoch.number == 0 or epoch.first < begun]
    if records:
        _warn_of_absent(epochs[-1])
    planned = [(first, {**described, "algorithm": algorithm}) for first, algorithm in phases] or [(1, dict(described))]
    for place, (first, config) in enumerate(planned):
        if place + 1 < len(planned) and planned[place + 1][0] <= begun:
            continue  # this phase is over
        if differences(epochs[-1].config, config):
            epochs.append(Epoch(len(epochs), max(first, begun), config, time.time()))
    return epochs


def _warn_of_absent(epoch: Epoch) -> None:
    """Warn of settings that a run's last epoch has and that nothing here carries out; the record keeps them."""
    with suppress(ConfigError):
        _, absent = recorded_config(cast("Mapping[str, object]", epoch.config.get("config", {})))
        if absent:
            log.warning(
                "the run was recorded with settings that are unknown here, and goes on without them: %s.%s",
                ", ".join(absent),
                "".join(dict.fromkeys(plugins().brought("settings", key) for key in absent)),
            )


def changes_of(epochs: Sequence[Epoch], number: int) -> list[str]:
    """Return the settings that an epoch changed, in words, a line for each: `engine.lr 1e-06 → 1e-05`."""
    found = differences(epochs[number - 1].config, epochs[number].config)
    return [f"{name} {_shown(old)} → {_shown(new)}" for name, (old, new) in found.items()]


def _shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def differences(stored: Mapping[str, Json], now: Mapping[str, Json]) -> dict[str, tuple[Json, Json]]:
    """Return the settings that differ from the stored ones, by name, each with the stored and the present value. A setting of a
    plugin that is absent here is left out, and a setting that is not stored has its default."""
    old, new = _flatten(_comparable(stored)), _flatten(_comparable(now))
    return {
        key.removeprefix("config."): (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _comparable(recorded: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return a record in JSON with the settings that this process knows. If this process does not accept the settings, they
    stay as recorded."""
    plain: dict[str, Json] = json.loads(json.dumps(recorded))
    if isinstance(said := plain.get("config"), Mapping):
        with suppress(ConfigError):
            plain["config"] = recorded_config(said)[0].model_dump(mode="json")
    return plain


def _among(name: str, settings: Sequence[str]) -> bool:
    """Whether the setting `name` is one of `settings`, or is in a section that `settings` name; `*` stands for any name."""
    return any(fnmatchcase(name, other) or fnmatchcase(name, f"{other}.*") for other in settings)


def _flatten(value: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    flat: dict[str, Json] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def type_name(value: object) -> str:
    """Return the module and the name of a value's class, as a run's record has them."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def recorded(value: object) -> object:
    """Return the JSON of a value for which JSON has no word, as the `default` of `json.dumps`.

    A function: `{"function": its name, "sha256": of its source}` · a `functools.partial`: its parts · a dataclass: its `type`
    and fields · a scalar of numpy: its value · any other object: its type as `object`, and its `repr` unless the `repr` has an
    address.

    An object that can be called has the `sha256` of its class's source instead of the `repr`. A class of lightning has no
    `sha256`, because it changes with a release; the digests of the steps tell whether it still does the same.
    """
    if isinstance(value, partial):
        return {"partial": value.func, "args": list(value.args), "keywords": value.keywords}
    if isinstance(value, type) or inspect.isroutine(value):
        name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', repr(type(value)))}"
        return {"function": name} | _edition(value)
    kind: Any = type(value)
    is_ours = type_name(value).startswith(("lightning.", "lightning_"))
    edition = _edition(kind) if callable(value) and not is_ours else {}
    if dataclasses.is_dataclass(value):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
        return {"type": type_name(value)} | fields | edition
    if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):
        return plain
    return {"object": type_name(value)} | (edition if callable(value) else _repr(value))


def _repr(value: object) -> dict[str, object]:
    """Return the `repr` of an object (of a set in an order that is the same in all processes); nothing if the `repr` has an
    address."""
    text = f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, (set, frozenset)) else repr(value)
    return {} if " at 0x" in text else {"repr": text}


def holds_code(value: Json) -> bool:
    """Whether a recorded value contains a function or an object that only the user's code can make again."""
    if isinstance(value, Mapping):
        named = isinstance(value.get("function"), str) or isinstance(value.get("object"), str)
        return named or any(map(holds_code, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_code, value))


def code_digest(value: object) -> str:
    """Return the SHA-256 of the source of a user's function, or of the class of a callable object; "" for what is lightning's
    own, which changes with a release, and for what has no code. The source is read once, when it is first asked for: that of an
    algorithm at the beginning of a run, so that an edit of its file afterwards changes nothing."""
    inner = value.func if isinstance(value, partial) else value
    of: Any = inner if isinstance(inner, type) or inspect.isroutine(inner) else type(inner)
    is_ours = str(getattr(of, "__module__", "")).startswith(("lightning.", "lightning_"))
    return "" if is_ours or not callable(inner) else str(_edition(of).get("sha256", ""))


@lru_cache(maxsize=128)
def _edition(function: Any) -> dict[str, object]:
    """Return the SHA-256 of the source of a function or a class, or of its bytecode if there is no source; nothing if it is
    built in."""
    text = _source(function)
    if text is None:
        code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
        if not isinstance(code, CodeType):
            return {}
        text = _compiled(code)
    return {"sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}


def _source(function: object) -> str | None:
    try:
        if getattr(function, "__name__", "") == "<lambda>":
            return _lambda_source(function)
        return textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, TokenError):  # typed in, made by exec, built in, or its file is gone
        return None


def _lambda_source(function: object) -> str | None:
    """Return the source of a lambda alone, without the rest of its lines (`resume=True`); None if it is not found."""
    code: CodeType = function.__code__  # type: ignore[attr-defined]
    lines, _ = inspect.findsource(code)
    text = "".join(lines)
    places = [place for place in code.co_positions() if None not in place and place[0::2] != place[1::2]]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Lambda) or node.lineno != code.co_firstlineno:
            continue
        body = node.body
        first, last = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        if all(first <= (line, column) and (end, stop) <= last for line, end, column, stop in places):
            segment = ast.get_source_segment(text, node) or ""
            found.append((len(segment), segment))
    return min(found)[1] if found else None


def _compiled(code: CodeType) -> str:
    """Return the bytecode with its names and constants. It differs between versions of Python, but not between processes."""
    constants = [_constant(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _compiled(value)
    if isinstance(value, frozenset):  # in an order that differs between processes
        return str(sorted(map(_constant, value)))
    return str([_constant(item) for item in value]) if isinstance(value, tuple) else repr(value)
