"""Converts nouns to database values and back.

Each noun has a table of columns, made from its dataclass. Nested nouns (callers,
tool events, step rewards and states, labels) become JSON text. Extras, the opaque bytes that plugins keep with a call, an
outcome or a step, become one value.

The invariant: a noun read back equals the noun written, except that tuples of JSON become lists. Statements and readers take
their columns, and the order of columns, from the same table. So a new field of a noun is a new column, and needs another
schema. Any text of an agent survives, because JSON escapes it to ASCII.

A value that is searched for has a plain column.

Equal extras are equal bytes, in whatever order their plugins brought them. Their bounds are checked only here, before a store
writes, so every store refuses the same extras in the same words. The layout is little-endian and sorted by name; for each
name: a byte for the name's length in UTF-8, the name, the number of the plugin's bytes (uint32), the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from lightning.errors import DataError, StoreError
from lightning.store.protocol import Attempt
from lightning.types import (
    Caller,
    Json,
    Rollout,
    Run,
    Span,
    Status,
    StepRecord,
    StepReward,
    StepState,
    Task,
    ToolEvent,
    Transition,
    VersionRun,
    read_reason,
)

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
"""A row that a database returns, with its columns in the order of the statement."""
Value: TypeAlias = int | float | str | bytes | None
"""A value that a database takes."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump(value: object, what: str = "a value", encode: Callable[[object], str] = _encode) -> str:
    """Return a value as compact ASCII JSON. Raises `DataError`, which names it `what`, if the value is not JSON."""
    try:
        return encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON ({error}): use only None, bool, numbers, text, lists and dicts") from error


def load(text: str, what: str = "a value") -> Json:
    """Parse text that `dump` wrote. Raises `StoreError`, which names it `what`, if the stored text was damaged."""
    try:
        value: Json = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{what} is corrupt in the database: {error}. Restore the database from a backup") from error
    return value


def as_list(text: str, what: str) -> list[Any]:
    """Parse a list that `dump` wrote. Raises `StoreError` for anything else."""
    return cast("list[Any]", _load_as(list, "a list", text, what))


def as_mapping(text: str, what: str) -> Mapping[str, Any]:
    """Parse an object that `dump` wrote. Raises `StoreError` for anything else."""
    return cast("Mapping[str, Any]", _load_as(dict, "an object", text, what))


def _load_as(kind: type, expected: str, text: str, what: str) -> Json:
    value = load(text, what)
    if not isinstance(value, kind):
        raise StoreError(f"{what} is corrupt in the database: expected {expected}. Restore the database from a backup")
    return value


def plain_text(text: str) -> str:
    """Return text that any database takes: lone surrogates and NUL, which agents' error messages may hold, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def finite(value: float, what: str) -> float:
    """Return `value` as a float. Raises `DataError`, which names it `what`, if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{what} is {value!r}: it must be a finite number")
    return float(value)


LARGEST_EXTRA: Final = 17 << 19
"""The most bytes that one plugin may keep with one call, outcome or step: 8.5 MiB, so that every packed exchange fits."""
LONGEST_NAME: Final = 64
"""The most bytes of a plugin's name in UTF-8."""
_SIZE: Final = struct.Struct("<I")


def pack_extras(extras: Mapping[str, bytes], what: str) -> bytes | None:
    """Return the extras as one value; None for no extras. Raises `DataError`, which names them `what`, for a name that no
    plugin may have, for a value that is not bytes, and for too many bytes."""
    for name, kept in extras.items():
        check_extra(name, kept, what)
    parts = ((name.encode(), extras[name]) for name in sorted(extras))
    entries = ((bytes((len(head),)), head, _SIZE.pack(len(kept)), kept) for head, kept in parts)
    return b"".join(chain.from_iterable(entries)) or None


def check_extra(name: str, kept: bytes, what: str) -> None:
    """Raise `DataError`, which names the extras `what`, if no store takes the extra `kept` of the plugin `name`."""
    if not name.isprintable() or not 0 < len(name.encode()) <= LONGEST_NAME:
        raise DataError(
            f"{what} are of a plugin {name[:80]!r}: give the plugin's name, printable text of 1 to {LONGEST_NAME} bytes"
        )
    if not isinstance(kept, bytes):
        raise DataError(f"{what} are a {type(kept).__name__} of plugin {name!r}: let the plugin give bytes")
    if len(kept) > LARGEST_EXTRA:
        raise DataError(
            f"{what} are too large: plugin {name!r} gives {len(kept)} bytes, and a plugin may keep {LARGEST_EXTRA} with one "
            "call, outcome or step. Let it keep the rest in a file of its own, and the file's name here"
        )


def unpack_extras(value: bytes | None, what: str) -> dict[str, bytes]:
    """Return the extras that `pack_extras` packed. Raises `StoreError`, which names them `what`, for a damaged value."""
    found: dict[str, bytes] = {}
    data, at = value or b"", 0
    try:
        while at < len(data):
            start = at + 1 + data[at]
            name = data[at + 1 : start].decode()
            (size,) = _SIZE.unpack_from(data, start)
            at = start + _SIZE.size + size
            found[name] = data[at - size : at]
    except (struct.error, UnicodeDecodeError):
        at = -1
    if at != len(data):
        raise StoreError(f"{what} are corrupt in the database. Restore the database from a backup")
    return found


def extras_digest(packed: bytes | None) -> str:
    """Return the SHA-256 of packed extras in hex; empty for no extras."""
    return "" if packed is None else hashlib.sha256(packed).hexdigest()


@dataclass(frozen=True, slots=True)
class Label:
    """What became known of a call after it: its caller (None: as it was), and why it is not trained (empty: as it was)."""

    caller: Caller | None = None
    untrained: str = ""

    def put_on(self, call: Transition) -> Transition:
        """Return the call as the label says."""
        return replace(call, caller=self.caller or call.caller, untrained=self.untrained or call.untrained)

    def taken_off(self, call: Transition, caller: str, untrained: str) -> Transition:
        """Return a call that was read with this label as it is stored, with this `caller`, as text, and `untrained`; any other
        call as it is."""
        if self.caller == call.caller:
            call = replace(call, caller=caller_from_text(caller))
        return replace(call, untrained=untrained) if self.untrained and self.untrained == call.untrained else call


NO_LABEL: Final = Label()

_NESTED: Final = (Caller, ToolEvent, StepReward, StepState, VersionRun, Label)


@cache
def _defaults(noun: type[Any]) -> Mapping[str, object]:
    if noun not in _NESTED:
        raise TypeError(f"Object of type {noun.__name__} is not JSON serializable")
    return {field.name: field.default for field in fields(noun)}


def _parts(noun: Any) -> list[Any]:
    """Return the fields of a nested noun in order, without the last ones as far as they have their defaults: most callers have
    only an agent. Raises `TypeError` for any other object."""
    defaults = _defaults(noun.__class__)
    parts = [getattr(noun, name) for name in defaults]
    for default in reversed(list(defaults.values())):
        if parts[-1] != default:
            break
        parts.pop()
    return parts


_encode_nouns = json.JSONEncoder(separators=(",", ":"), default=_parts).encode


def nouns_to_text(nouns: object, what: str) -> str:
    """Return nouns as JSON, each noun and each one nested in it as a list of its fields. Raises `DataError`, which names them
    `what`, if a field is not JSON."""
    return dump(nouns, what, _encode_nouns)


def step_rewards_to_text(rewards: Sequence[StepReward]) -> str:
    """Return the step rewards of an attempt as JSON. Raises `DataError` for a NaN or infinite value."""
    finite_ones = [replace(reward, value=finite(reward.value, f"step reward {reward.name!r}")) for reward in rewards]
    return nouns_to_text(finite_ones, "a step reward")


def labels_to_text(labels: Mapping[str, Caller], untrained: Mapping[str, str]) -> str:
    """Return the labels of an attempt as JSON, sorted by response id, so that equal labels are equal text. Raises `DataError`
    for a reason that no call may have."""
    reasons = {each: read_reason(reason, f"the reason of the call {each!r}") for each, reason in untrained.items()}
    named = sorted(labels.keys() | reasons.keys())
    return nouns_to_text({each: Label(labels.get(each), reasons.get(each, "")) for each in named}, "a label")


def labels_from_text(text: str) -> dict[str, Label]:
    """Return the labels that `labels_to_text` wrote, by response id."""
    found = as_mapping(text, "the labels of an attempt").items()
    return {each: Label(None if caller is None else _caller(*caller), *more) for each, (caller, *more) in found}


def _caller(agent: str, path: Sequence[str] = (), *more: str) -> Caller:
    return Caller(agent, tuple(path), *more)


@lru_cache(maxsize=256)
def caller_from_text(text: str) -> Caller:
    """Return the caller of a transition from its JSON."""
    return _caller(*as_list(text, "the caller of a transition"))


def _tool_event(*parts: Any) -> ToolEvent:
    caller = [None if each is None else _caller(*each) for each in parts[6:7]]
    return ToolEvent(*parts[:6], *caller, *parts[7:])


@lru_cache(maxsize=256)
def _versions_to_text(versions: tuple[VersionRun, ...]) -> str:
    return nouns_to_text(versions, "a policy version")


@lru_cache(maxsize=256)
def _versions_from_text(text: str) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(*parts) for parts in as_list(text, "the policy versions of a transition"))


@dataclass(frozen=True, slots=True)
class Form:
    """How a field is written and read. Both functions get the value, and its name for errors. None keeps the value as it is."""

    write: Callable[[Any, str], Value] | None = None
    read: Callable[[Any, str], Any] | None = None


_SIMPLE: Final[Mapping[object, Form]] = {
    **dict.fromkeys((str, int, bytes), Form()),
    float: Form(finite),
    bool: Form(lambda value, _: int(value), lambda value, _: bool(value)),
}


def _form(kind: Any) -> Form:
    """Return how a field of a type is kept, unless the table of its noun says otherwise."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return Form(lambda value, _: value.value, lambda value, _: kind(value))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType and NoneType in arguments:
        (some,) = (each for each in arguments if each is not NoneType)
        if isinstance(some, type) and issubclass(some, StrEnum):  # a text column is never NULL
            return Form(lambda value, _: "" if value is None else value.value, lambda v, _: some(v) if v else None)
        write, read = (inner := _form(some)).write, inner.read
        return Form(
            write and (lambda value, what: None if value is None else write(value, what)),
            read and (lambda value, what: None if value is None else read(value, what)),
        )
    if origin is Mapping and arguments[1] is bytes:
        return Form(pack_extras, unpack_extras)
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return Form(lambda value, what: dump(dict(value), what), as_mapping)
    if origin is tuple and arguments[0] is str:
        return Form(lambda value, what: dump(list(value), what), lambda text, what: tuple(as_list(text, what)))
    raise TypeError(f"no column keeps a {kind}: say how in the table of its noun")


def _many(noun: Callable[..., Any]) -> Form:
    """Return how a tuple of nouns is read, each made by `noun` from a list of its fields. `rollout_state.ending` writes
    them."""
    return Form(None, lambda text, what: tuple(noun(*parts) for parts in as_list(text, what)))


PLAIN: Final = Form(lambda text, _: plain_text(text))


class Columns(Generic[T]):
    """The columns of a noun, in the order of its fields.

    `without` are fields that are stored elsewhere. `named` gives the columns whose name is not the field's, and `forms` the
    fields that are not stored as their type is. `what` is the noun's name in errors, formatted with the noun as `_`; `words`
    are names of fields in errors.
    """

    def __init__(
        self,
        noun: type[T],
        what: str,
        *,
        without: Collection[str] = (),
        named: Mapping[str, str] = MappingProxyType({}),
        forms: Mapping[str, Form] = MappingProxyType({}),
        words: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        kinds = self.kinds = get_type_hints(noun, localns={"Json": object})  # which only a type checker can evaluate
        names = [field.name for field in fields(noun)]  # type: ignore[arg-type]
        self._noun, self._what = noun, what
        self.fields: Final = tuple(name for name in names if name not in without)
        self.columns: Final = tuple(named.get(name, name) for name in self.fields)
        self._words = {name: words.get(name, f"the {name.replace('_', ' ')}") for name in self.fields}
        self._forms = {name: forms.get(name) or _form(kinds[name]) for name in self.fields}
        self._readers = [(name, form.read) for name, form in self._forms.items() if form.read is not None]
        self._get = attrgetter(*self.fields)
        self._writers = [
            (place, name, form.write) for place, (name, form) in enumerate(self._forms.items()) if form.write
        ]

    def names(
        self, prefix: str = "", *, without: Collection[str] = (), blank: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Return the columns as a statement lists them, each with the `prefix`. `blank` gives SQL values for fields that are
        not to be read."""
        pairs = zip(self.fields, self.columns, strict=True)
        return ", ".join(blank.get(name, prefix + column) for name, column in pairs if name not in without)

    def values(self, noun: T, *, without: Collection[str] = ()) -> tuple[Value, ...]:
        """Return the database values of a noun. Raises `DataError` for a value that cannot be stored."""
        values = list(self._get(noun))
        for place, name, write in self._writers:
            try:
                values[place] = write(values[place], "")
            except DataError:  # again, with the field's name: making it costs more than writing does
                values[place] = write(values[place], f"{self._words[name]} of {self._what.format(_=noun)}")
        if without:
            values = [value for name, value in zip(self.fields, values, strict=True) if name not in without]
        return tuple(values)

    def read(self, row: Sequence[Any], **more: object) -> T:
        """Return the noun of a row; `more` gives the fields that are stored elsewhere. Raises `StoreError`, `ValueError` or
        `TypeError` for a damaged row."""
        found = dict(zip(self.fields, row, strict=True))
        found.update(more)
        for name, read in self._readers:
            try:
                found[name] = read(found[name], "")
            except StoreError:  # as above
                found[name] = read(
                    found[name], f"{self._words[name]} of {self._what.format(_=SimpleNamespace(**found))}"
                )
        return self._noun(**found)


def _task_from_text(text: str, what: str) -> Task:
    task, given, expected, metadata = as_list(text, what)
    return Task(given, expected, metadata, task)


def resources_to_text(versions: Mapping[str, int], what: str) -> str:
    """Return versions of resources as JSON, equal text for equal versions. Raises `DataError`, which names them `what`, for a
    version that is not a whole number from 1 on."""
    for name, version in versions.items():
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise DataError(f"one of {what} names version {version!r} of resource {name!r}: versions are 1, 2, ...")
    return dump({name: versions[name] for name in sorted(versions)})


def call_from_text(text: str, what: str) -> tuple[str, int, int] | None:
    """Return the key of the call at which a rollout branches; None for a rollout that is no branch."""
    if not text:
        return None
    rollout, attempt, seq = as_list(text, what)
    return str(rollout), int(attempt), int(seq)


RUNS: Final = Columns(Run, "run {_.id!r}", words={"config": "the configuration"})
ROLLOUTS: Final = Columns(
    Rollout,
    "rollout {_.id!r}",
    named={"group": "group_id", "index": "idx"},
    forms={
        "task": Form(
            lambda task, _: dump([task.id, task.input, task.expected, dict(task.metadata)], f"task {task.id!r}"),
            _task_from_text,
        ),
        "resources": Form(resources_to_text, as_mapping),
        "parent": Form(lambda key, what: "" if key is None else dump(list(key), what), call_from_text),
    },
)
EARNED: Final = ("status", "attempt", "reward", "rewards", "fault", "error", "seconds", "trained_at_step")
"""The fields of a rollout that it gets after its creation."""
CALLS: Final = Columns(
    Transition,
    "transition ({_.rollout!r}, {_.attempt}, {_.seq})",
    without=("rollout", "attempt", "prompt_ids", "response_ids", "logprobs"),
    forms={
        "caller": Form(nouns_to_text, lambda text, _: caller_from_text(text)),
        "versions": Form(lambda parts, _: _versions_to_text(parts), lambda text, _: _versions_from_text(text)),
    },
    words={"tool_calls": "a tool call", "started_at": "started_at", "ended_at": "ended_at"},
)
ATTEMPTS: Final = Columns(
    Attempt,
    "attempt {_.attempt} of rollout {_.rollout!r}",
    forms={
        "tool_events": _many(_tool_event),
        "step_rewards": _many(StepReward),
        "step_states": _many(StepState),
    },
)
SPANS: Final = Columns(
    Span,
    "span {_.span_id!r} of rollout {_.rollout!r}",
    without=("rollout", "attempt"),
    forms={"name": PLAIN, "error": PLAIN, "service": PLAIN},
    words={"attributes": "an attribute", "started_at": "started_at", "ended_at": "ended_at"},
)


def _number_of_step(step: int, what: str) -> int:
    if step < 1:
        raise DataError(f"{what} is {step}: count the steps of a run from 1")
    return step


STEPS: Final = Columns(
    StepRecord,
    "step {_.step} of run {_.run!r}",
    named={"groups": "group_ids"},
    forms={
        "rollouts": Form(
            lambda pairs, _: dump([[rollout, attempt] for rollout, attempt in pairs]),
            lambda text, what: tuple((rollout, attempt) for rollout, attempt in as_list(text, what)),
        ),
        "step": Form(_number_of_step),
    },
    words={"step": "the number"},
)


def rollout_values(rollout: Rollout) -> tuple[Value, ...]:
    """Return the database values of a new rollout, without the `EARNED` fields. Raises `DataError` unless the rollout is new:
    pending, without attempt and reward, with `max_attempts` of at least 1."""
    if rollout.status is not Status.PENDING or rollout.attempt != 0 or rollout.reward is not None:
        raise DataError(
            f"rollout {rollout.id!r} is created as {rollout.status.value} with attempt {rollout.attempt}: "
            "create rollouts pending, then lease and complete them"
        )
    if rollout.max_attempts < 1:
        raise DataError(f"rollout {rollout.id!r} has max_attempts={rollout.max_attempts}: it must be at least 1")
    return ROLLOUTS.values(rollout, without=EARNED)
