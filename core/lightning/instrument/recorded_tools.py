"""Runs of `lightning.tool` that are answered from a record instead of being made, for replay.

The invariant: a tool that is answered returns, yields or raises as its kind of function does; nothing of its body runs. Only
code inside `answer_tools` is concerned, in whatever thread or task that has its context.
"""

from __future__ import annotations

import builtins
import inspect
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lightning.types import Json, ToolEvent

Find = Callable[[str, Json], ToolEvent | None]
"""From a tool's name and arguments to the recorded run that answers; None lets the tool run."""

_find: ContextVar[Find | None] = ContextVar("lightning_recorded_tools", default=None)


@contextmanager
def answer_tools(find: Find) -> Iterator[None]:
    """Inside the block, a run of a `lightning.tool` is answered with what `find` gives for it."""
    token = _find.set(find)
    try:
        yield
    finally:
        _find.reset(token)


def recorded_run(name: str, arguments: Json) -> ToolEvent | None:
    """The recorded run that answers this one; None where the tool is to run, also for one whose result was not kept."""
    find = _find.get()
    found = None if find is None else find(name, arguments)
    return None if found is None or found.incomplete else found


def replayed(event: ToolEvent, function: object) -> object:
    """What calling `function` gives when its run is answered: a value, a coroutine, a generator or an async generator."""
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
    return _value(event)


def _items(event: ToolEvent) -> Generator[object, None, object]:
    value = _value(event)
    if not isinstance(value, list):
        return value  # what the generator returned
    yield from value
    return None


async def _async_items(event: ToolEvent) -> AsyncIterator[object]:
    value = _value(event)
    for item in value if isinstance(value, list) else ():
        yield item


def _error(said: str) -> Exception:
    """The exception of a text like `KeyError: 'k'`: Python's own class where it is one that takes a message."""
    name, _, message = said.partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
        return kind(message.strip("'\"") if kind is KeyError else message)
    return RuntimeError(said)
