"""Reads a store's content as rows of plain values, table by table, for JSON lines or Parquet.

The invariant: it uses only operations that every store has, page by page, so that memory does not grow with the store. Token
ids and log-probabilities are the stored ones, bit for bit.

Data that is added during the export may be in it or not. A rollout is in it as it was when its page was read.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, TypeAlias, get_args

from lightning.errors import ParentGoneError, StoreError
from lightning.store import rows
from lightning.store.pages import batched, each_rollout, each_step
from lightning.store.protocol import Attempt, Store
from lightning.trainer.context import read_epochs
from lightning.types import (
    Caller,
    Conversation,
    Json,
    LogProbs,
    Rollout,
    Run,
    TokenIds,
    Transition,
)
from lightning_otel.traces.store import spans
from lightning_record import exchanges
from lightning_record.conversation import CONVERSATION, conversation_in
from lightning_record.exchanges import TEXTS, Exchange, Parent, packed_in, parents_of

BATCH: Final = 32
"""The number of attempts whose calls are read together."""
Cell: TypeAlias = "Json | TokenIds | LogProbs"
Record: TypeAlias = dict[str, Cell]


class ColumnKind(StrEnum):
    """The type of a column's values. `JSON` is any JSON: the value in JSON lines, its text in Parquet."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    TRUTH = "truth"
    JSON = "json"
    TEXTS = "texts"
    IDS = "ids"
    LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class ExportScope:
    """The data to export: the rollouts of these runs (empty: all) and of this split (None: all). With `attempts` all attempts
    of a rollout are exported, else only the last one."""

    runs: tuple[str, ...] = ()
    split: str | None = None
    attempts: bool = False


Rows: TypeAlias = Callable[[Store, Run, ExportScope], AsyncIterator[Record]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of an export: its columns in order, and what reads its rows for one run."""

    columns: Mapping[str, ColumnKind]
    read: Rows


async def _runs(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
    yield {
        "run": run.id,
        "name": run.name,
        "project": run.project,
        "created_at": run.created_at,
        "config": dict(run.config),
        "epochs": [
            {"epoch": epoch.number, "first": epoch.first, "at": epoch.at, "config": dict(epoch.config)}
            for epoch in (await read_epochs(store, run))[1:]
        ],
    }


async def _rollouts(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
    async for rollout in each_rollout(store, run.id, split=scope.split):
        yield {
            "run": run.id,
            "rollout": rollout.id,
            **_plain(rollout, _ROLLOUT),
            "task_id": rollout.task.id,
            "input": rollout.task.input,
            "expected": rollout.task.expected,
            "metadata": dict(rollout.task.metadata),
        }


async def _transitions(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
    async for some in batched(_attempts(store, run, scope), BATCH):
        keys = [(rollout.id, attempt) for rollout, attempt in some]
        read = await store.transitions_of(keys)
        parents = await parents_of(store, [rollout for rollout, _ in some], dict(zip(keys, read, strict=True)))
        for (rollout, attempt), calls, parent in zip(some, read, parents, strict=True):
            found, why = _exchanges(calls, parent)
            for call, exchange in zip(calls, found, strict=True):
                unreadable = "" if packed_in(call) is None else why
                yield {**_of_attempt(run, rollout, attempt), **_transition(call, exchange, unreadable)}


def _exchanges(calls: Sequence[Transition], parent: Parent | None) -> tuple[Sequence[Exchange | None], str]:
    """Return the exchanges of an attempt's calls, and an empty text. For a branch whose parent's calls are gone return None for
    each call, and the reason."""
    try:
        return exchanges.read(calls, parent), ""
    except ParentGoneError as error:
        return [None] * len(calls), str(error)


def _transition(call: Transition, exchange: Exchange | None, unreadable: str) -> Record:
    said = exchange or Exchange("", None)
    return {
        **_plain(call, _CALL),
        "api": said.path,
        "request": said.request,
        "reply": said.reply,
        "http_status": said.status,
        "redacted": said.redacted,
        "too_large": said.too_large,
        "unreadable": unreadable,
        **_caller(call.caller),
        "conversation": _conversation(conversation_in(call)),
        "versions": [{"start": part.start, "version": part.version, "policy": part.policy} for part in call.versions],
        "extras": _extras(call.extras),
        "prompt_ids": call.prompt_ids,
        "response_ids": call.response_ids,
        "logprobs": call.logprobs,
    }


def _extras(extras: Mapping[str, bytes]) -> Json:
    """Return plugins' extras as base64, without the extras that have columns of their own."""
    return {name: b64encode(kept).decode() for name, kept in extras.items() if name not in (TEXTS, CONVERSATION)}


def _conversation(said: Conversation | None) -> Json:
    return None if said is None else {"after": said.after, "kept": said.kept, "messages": list(said.messages)}


def _of_ended(rows_of: Callable[[Attempt], Iterable[Record]]) -> Rows:
    """Return a reader of rows that `rows_of` makes of the end of each attempt."""

    async def read(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
        async for rollout, attempt in _attempts(store, run, scope):
            (ended,) = await store.attempts_of([(rollout.id, attempt)])
            for row in rows_of(ended):
                yield {**_of_attempt(run, rollout, attempt), **row}

    return read


def _tool_events(ended: Attempt) -> Iterator[Record]:
    for place, event in enumerate(ended.tool_events):
        yield {
            "place": place,
            "name": event.name,
            "status": event.status,
            "call_id": event.call_id,
            "arguments": event.arguments,
            "output": event.output,
            "error": event.error,
            **_caller(event.caller or Caller("")),
            "at": event.at,
            "response_id": event.response_id,
            "result": event.result,
            "incomplete": event.incomplete,
            "kind": event.kind,
        }


def _step_rewards(ended: Attempt) -> Iterator[Record]:
    for place, one in enumerate(ended.step_rewards):
        yield {"place": place, "name": one.name, "value": one.value, "response_id": one.response_id, "at": one.at}


def _step_states(ended: Attempt) -> Iterator[Record]:
    for place, one in enumerate(ended.step_states):
        yield {"place": place, "name": one.name, "values": one.values, "response_id": one.response_id, "at": one.at}


def _outcome_extras(ended: Attempt) -> Iterator[Record]:
    for name, kept in sorted(ended.extras.items()):
        yield {"plugin": name, "bytes": b64encode(kept).decode()}


async def _spans(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
    async for rollout, attempt in _attempts(store, run, scope):
        for span in await spans(store, rollout.id, attempt):
            yield {**_of_attempt(run, rollout, attempt), **_plain(span, _SPAN)}


async def _steps(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
    async for record in each_step(store, run.id):
        yield {
            "run": run.id,
            **_plain(record, _STEP),
            "rollouts": [{"rollout": name, "attempt": attempt} for name, attempt in record.rollouts],
            "extras": _extras(record.extras),
        }


async def _metrics(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[Record]:
    for point in await store.metrics(run.id):
        for name, value in point.values.items():
            yield {"run": run.id, "step": point.step, "name": name, "value": value, "at": point.at}


async def _attempts(store: Store, run: Run, scope: ExportScope) -> AsyncIterator[tuple[Rollout, int]]:
    """Yield the attempts to export of each rollout; none for a rollout that has not begun."""
    async for rollout in each_rollout(store, run.id, split=scope.split):
        for attempt in range(1 if scope.attempts else max(rollout.attempt, 1), rollout.attempt + 1):
            yield rollout, attempt


def _of_attempt(run: Run, rollout: Rollout, attempt: int) -> Record:
    return {"run": run.id, "split": rollout.split, "rollout": rollout.id, "attempt": attempt}


def _caller(caller: Caller) -> Record:
    return {
        "agent": caller.agent,
        "path": list(caller.path),
        "caller_span": caller.span_id,
        "caller_parent": caller.parent_id,
        "framework": caller.framework,
    }


def _columns(**kinds: ColumnKind) -> Mapping[str, ColumnKind]:
    return kinds


def _kinds(columns: rows.Columns[Any], *without: str) -> Mapping[str, ColumnKind]:
    """Return the column types of a noun's fields, without the fields named in `without`."""
    return {name: _kind(columns.kinds[name]) for name in columns.fields if name not in without}


def _kind(hint: Any) -> ColumnKind:
    known = {
        str: ColumnKind.TEXT,
        int: ColumnKind.INTEGER,
        float: ColumnKind.NUMBER,
        bool: ColumnKind.TRUTH,
        tuple[str, ...]: ColumnKind.TEXTS,
    }
    (some, *_) = [each for each in get_args(hint) if each is not NoneType] if isinstance(hint, UnionType) else [hint]
    if isinstance(some, type) and issubclass(some, StrEnum):
        return ColumnKind.TEXT
    return known.get(some, ColumnKind.JSON)


def _plain(noun: object, kinds: Mapping[str, ColumnKind]) -> Record:
    """Return the fields of a noun that are in `kinds`, as plain values."""
    return {name: _plain_value(getattr(noun, name)) for name in kinds}


def _plain_value(value: Any) -> Cell:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    plain: Cell = list(value) if isinstance(value, tuple) else value
    return plain


_ROLLOUT: Final = _kinds(rows.ROLLOUTS, "id", "run", "task")
_CALL: Final = _kinds(rows.CALLS, "caller", "versions", "extras")
_SPAN: Final = _kinds(rows.SPANS)
_STEP: Final = _kinds(rows.STEPS, "run", "rollouts", "extras")
_T, _I, _N, _J = ColumnKind.TEXT, ColumnKind.INTEGER, ColumnKind.NUMBER, ColumnKind.JSON
_ATTEMPT: Final = {"run": _T, "split": _T, "rollout": _T, "attempt": _I}
_CALLER: Final = {"agent": _T, "path": ColumnKind.TEXTS, "caller_span": _T, "caller_parent": _T, "framework": _T}

TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {
        "runs": Table(_columns(run=_T, name=_T, project=_T, created_at=_N, config=_J, epochs=_J), _runs),
        "rollouts": Table(
            _columns(
                run=_T,
                rollout=_T,
                **_ROLLOUT,
                task_id=_T,
                input=_J,
                expected=_J,
                metadata=_J,
            ),
            _rollouts,
        ),
        "transitions": Table(
            _columns(
                **_ATTEMPT,
                **_CALL,
                api=_T,
                request=_J,
                reply=_J,
                http_status=_I,
                redacted=ColumnKind.TRUTH,
                too_large=ColumnKind.TRUTH,
                unreadable=_T,
                **_CALLER,
                conversation=_J,
                versions=_J,
                extras=_J,
                prompt_ids=ColumnKind.IDS,
                response_ids=ColumnKind.IDS,
                logprobs=ColumnKind.LOGPROBS,
            ),
            _transitions,
        ),
        "tool_events": Table(
            _columns(
                **_ATTEMPT,
                place=_I,
                name=_T,
                status=_T,
                call_id=_T,
                arguments=_J,
                output=_T,
                error=_T,
                **_CALLER,
                at=_N,
                response_id=_T,
                result=_T,
                incomplete=ColumnKind.TRUTH,
                kind=_T,
            ),
            _of_ended(_tool_events),
        ),
        "step_rewards": Table(
            _columns(**_ATTEMPT, place=_I, name=_T, value=_N, response_id=_T, at=_N), _of_ended(_step_rewards)
        ),
        "step_states": Table(
            _columns(**_ATTEMPT, place=_I, name=_T, values=_J, response_id=_T, at=_N), _of_ended(_step_states)
        ),
        "outcome_extras": Table(_columns(**_ATTEMPT, plugin=_T, bytes=_T), _of_ended(_outcome_extras)),
        "spans": Table(_columns(**_ATTEMPT, **_SPAN), _spans),
        "steps": Table(_columns(run=_T, **_STEP, rollouts=_J, extras=_J), _steps),
        "metrics": Table(_columns(run=_T, step=_I, name=_T, value=_N, at=_N), _metrics),
    }
)
"""The tables of an export, in the order in which they are written."""


async def chosen_runs(store: Store, names: Sequence[str]) -> list[Run]:
    """Return the runs with these ids; all runs for no ids. Raises `StoreError` for an unknown run."""
    known = {run.id: run for run in await store.list_runs()}
    for name in names:
        if name not in known:
            raise StoreError(f"there is no run {name!r} in this store; it has {', '.join(known) or 'none'}")
    return [known[name] for name in names] if names else list(known.values())


async def read_table(store: Store, table: str, runs: Sequence[Run], scope: ExportScope) -> AsyncIterator[Record]:
    """Yield the rows of one of `TABLES` for some runs."""
    for run in runs:
        async for record in TABLES[table].read(store, run, scope):
            yield record
