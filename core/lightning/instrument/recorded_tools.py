"""Runs of `lightning.tool` that are answered from a record instead of being made, for replay.

The invariant: a tool that is answered returns, yields or raises as its kind of function does; nothing of its body runs. It
concerns the rollout that it was asked for and no other, in whatever thread or task that rollout's code runs.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from lightning.errors import DataError
from lightning.types import Json, ToolEvent

Find = Callable[[str, Json, object], ToolEvent | None]
"""From a tool's name, arguments and function to the recorded run that answers; None lets the tool run. It may raise instead,
which is then what the tool raises."""

PATIENCE = 60.0
"""Seconds within which a tool that was cancelled when it was recorded has to be cancelled again."""

_finds: dict[str, Find] = {}


@contextmanager
def answer_tools(api_key: str, find: Find) -> Iterator[None]:
    """Inside the block, the runs of `lightning.tool` in the rollout with this key are answered with what `find` gives."""
    _finds[api_key] = find
    try:
        yield
    finally:
        del _finds[api_key]


def recorded_run(api_key: str, name: str, arguments: Json, function: object) -> ToolEvent | None:
    """The recorded run that answers this one; None where the tool is to run."""
    find = _finds.get(api_key) if _finds else None
    return None if find is None else find(name, arguments, function)


class RecordedRuns:
    """Recorded runs of tools, each given once: in their order for equal arguments."""

    def __init__(self, events: Sequence[ToolEvent]) -> None:
        # A framework that runs a `lightning.tool` tells of it as well, under the call's id and without the whole result.
        self._left = [event for event in events if not event.call_id]
        self._lock = threading.Lock()
        self.answered: list[ToolEvent] = []

    def take(self, name: str, arguments: Json, function: object) -> ToolEvent | None:
        """The first run of this tool with these arguments that has not been given; None without one."""
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
    """Whether a recorded run says all that a function of this kind gave: not what it yielded before it raised."""
    streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return not event.incomplete and event.status in ("ok", "error") and not (streams and event.status == "error")


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
    if event.status == "error" and event.error.startswith("CancelledError"):
        await asyncio.sleep(PATIENCE)  # whoever lost patience then does so again
        raise DataError(f"the tool {event.name} was cancelled when it was recorded, and is not now")
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
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, UnicodeError | ExceptionGroup):
        return RuntimeError(said)
    if kind is KeyError:
        with suppress(ValueError, SyntaxError):
            return KeyError(ast.literal_eval(message))
    return kind(message)
