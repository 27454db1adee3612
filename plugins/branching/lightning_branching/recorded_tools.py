"""Replay of `lightning.tool` runs: they are answered from a record instead of being made.

The invariant: a replayed tool returns, yields or raises as its kind of function does, and none of its body runs. Only the
rollout for which replay was asked is concerned, in every thread and task that its code runs in.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

from lightning.errors import DataError
from lightning.instrument import components
from lightning.types import Json, ToolEvent

Find = Callable[[str, Json, object], ToolEvent | None]
"""A function from a tool's name, arguments and function to the recorded run to replay; None lets the tool run. An exception
that it raises is raised by the tool."""

PATIENCE = 60.0
"""The time limit in seconds for a tool that was cancelled when it was recorded to be cancelled again in a replay."""


def answer_tools(api_key: str, find: Find) -> AbstractContextManager[None]:
    """Inside the block, runs of `lightning.tool` in the rollout with this key are answered by the recorded runs that `find`
    returns."""

    def stand_in(name: str, arguments: Json, function: object) -> Callable[[], object] | None:
        event = find(name, arguments, function)
        return None if event is None else partial(replayed, event, function)

    return components.replace_tools(api_key, stand_in)


class RecordedRuns:
    """Recorded runs of tools, each of which is given once; runs with equal arguments are given in their order. `answered` are
    those given so far."""

    def __init__(self, events: Sequence[ToolEvent]) -> None:
        # A framework that runs a `lightning.tool` reports the run, too, with a call id and without the whole result.
        self._left = [event for event in events if not event.call_id]
        self._lock = threading.Lock()
        self.answered: list[ToolEvent] = []

    def take(self, name: str, arguments: Json, function: object) -> ToolEvent | None:
        """Return the first run of this tool with these arguments that was not given yet; None if there is none."""
        wanted = (name, json.dumps(arguments, sort_keys=True))
        with self._lock:
            for event in self._left:
                same = (event.name, json.dumps(event.arguments, sort_keys=True)) == wanted
                if same and can_answer(event, function):
                    self._left.remove(event)
                    self.answered.append(event)
                    return event
        return None


def can_answer(event: ToolEvent, function: object) -> bool:
    """Whether a recorded run holds all that is needed to replay a function of this kind. Items that a generator yielded before
    it raised are not recorded."""
    streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return not event.incomplete and event.status in ("ok", "error") and not (streams and event.status == "error")


def replayed(event: ToolEvent, function: object) -> object:
    """Return the result of calling `function` when its run is replayed: a value, a coroutine, a generator or an async
    generator. A plain function whose recorded run failed raises."""
    if inspect.isasyncgenfunction(function):
        return _async_items(event)
    if inspect.isgeneratorfunction(function):
        return _items(event)
    if inspect.iscoroutinefunction(function):
        return _awaited(event)
    return _value(event)


def _value(event: ToolEvent) -> object:
    if event.status == "error":
        raise _error(event.error)
    return json.loads(event.result) if event.result else event.output


async def _awaited(event: ToolEvent) -> object:
    if event.status == "error" and event.error.startswith("CancelledError"):
        await asyncio.sleep(PATIENCE)  # the caller that cancelled it then does so again
        raise DataError(f"the tool {event.name} was cancelled when it was recorded, and is not now")
    return _value(event)


def _items(event: ToolEvent) -> Generator[object, None, object]:
    value = _value(event)
    if not isinstance(value, list):
        return value  # the generator's return value; it yielded nothing
    yield from value
    return None


async def _async_items(event: ToolEvent) -> AsyncIterator[object]:
    value = _value(event)
    for item in value if isinstance(value, list) else ():
        yield item


def _error(said: str) -> Exception:
    """Return the exception of a text like `KeyError: 'k'`: of the built-in class if that takes a message, else
    `RuntimeError`."""
    name, _, message = said.partition(": ")
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, UnicodeError | ExceptionGroup):
        return RuntimeError(said)
    if kind is KeyError:
        with suppress(ValueError, SyntaxError):
            return KeyError(ast.literal_eval(message))
    return kind(message)
