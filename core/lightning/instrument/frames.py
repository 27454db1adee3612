"""The names of the user's functions that are running, outermost first, from the stack of frames.

The invariant: the result does not depend on how the agent is run (main thread, thread, task, worker process). Functions of
installed packages, of the standard library and of lightning are left out; so are the callers of lightning's runner, and of the
event loop that runs its tasks. In a task or thread where no function of the user runs, such as
`asyncio.gather(client.create())`, the result are the functions that started it.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal, ParamSpec, TypeVar

import lightning
from lightning.instrument.last_call import known_as

MAX_DEPTH = 32
"""The largest number of names, of which the innermost are kept: the path is sent in a header."""
MOST_SEEN = 4096
"""The size of the caches of functions, and of files, whose origin is known."""

P = ParamSpec("P")
R = TypeVar("R")


class _Origin(Enum):
    USER = "user"
    LIBRARY = "library"
    LIGHTNING = "lightning"
    LOOP = "loop"


_Name = str | Literal[_Origin.LIGHTNING, _Origin.LOOP]


def _folder(file: str | None) -> str:
    return str(Path(file or "").resolve().parent) + "/"


_LIGHTNING = _folder(lightning.__file__)
_ASKING = (_folder(__file__), _LIGHTNING + "plugins/")
"""The parts of lightning whose frames stand between the agent's code and `user_functions`."""
_LOOP = (asyncio.Runner.run.__code__, asyncio.BaseEventLoop.run_forever.__code__)
_LIBRARIES = tuple(
    str(Path(path).resolve()) + "/"
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


@lru_cache(MOST_SEEN)
def _origin(filename: str) -> _Origin:
    if filename.startswith("<frozen "):
        return _Origin.LIBRARY
    if filename.startswith("<"):
        return _Origin.USER  # notebooks, `python -c`, exec
    path = str(Path(filename).resolve())
    if path.startswith(_ASKING):
        return _Origin.LIBRARY
    if path.startswith(_LIGHTNING):
        return _Origin.LIGHTNING
    if path.startswith(_LIBRARIES) or "/site-packages/" in path or "/dist-packages/" in path:
        return _Origin.LIBRARY
    return _Origin.USER


def know_origin(filename: str) -> None:
    """Find out and keep whether the functions of a file are the user's."""
    _origin(filename)


def _plain(qualified: str) -> str:
    """Return the name to use for a qualified name: `Writer.draft` as it is, `make.<locals>.agent` as `agent`, and "" for
    `<lambda>`, `<genexpr>` and `<module>`."""
    name = qualified.rpartition("<locals>.")[2]
    return "" if "<" in name else name


class _Thread(threading.local):
    started_by: tuple[str, ...] = ()


_thread = _Thread()
_started_by: ContextVar[tuple[int, tuple[str, ...]]] = ContextVar("lightning_started_by", default=(0, ()))
"""The ident of the thread that started this task, and the user's functions that ran there."""


def user_functions(above: int = 1) -> tuple[str, ...]:
    """Return the qualified names of the user's functions on the stack, outermost first; if there are none, of those that
    started this task or thread. At most the `MAX_DEPTH` innermost. `above` is the number of innermost frames to skip: 1 skips
    this function's."""
    names = _on_stack(sys._getframe(above))  # noqa: SLF001 — the one way to the stack that builds no list of all frames
    if names:
        return names
    thread, functions = _started_by.get()
    here = threading.get_ident()  # `asyncio.to_thread` copies a task's context into another thread
    return functions if thread == here else _thread.started_by or functions


def start_task(start: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `start`, which starts a task, and note the user's functions that run now as those that started the task."""
    with known_as(_started_by, (threading.get_ident(), user_functions())):
        return start(*args, **kwargs)


@contextmanager
def thread_started_by(functions: tuple[str, ...]) -> Iterator[None]:
    """Inside the block, these functions count as those that started this thread."""
    before, _thread.started_by = _thread.started_by, functions
    try:
        yield
    finally:
        _thread.started_by = before


def _on_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the names of the user's functions from `frame` outwards, up to lightning's runner. If the stack ends without a
    runner, the frames outside of an event loop are those of the program, and only the frames inside the loop count."""
    names: list[str] = []
    above_loop: int | None = None
    while frame is not None and len(names) < MAX_DEPTH:
        code = frame.f_code
        _, name = _seen.get(id(code)) or _look(code)
        if name is _Origin.LIGHTNING:
            return tuple(reversed(names))
        if name is _Origin.LOOP:
            above_loop = len(names) if above_loop is None else above_loop
        elif name:
            names.append(name)
        frame = frame.f_back
    return tuple(reversed(names[:above_loop]))


_seen: dict[int, tuple[CodeType, _Name]] = {}
"""The name of each code object's frames, by the object's id (its hash is slow). The object is kept, so that no other one gets
its id."""


def _look(code: CodeType) -> tuple[CodeType, _Name]:
    """Return a code object with its name: that of a user's function ("" for a lambda and for a library's function), or a mark
    for lightning's own code or an event loop. The result is cached in `_seen`."""
    origin = _origin(code.co_filename)
    name: _Name = _plain(code.co_qualname) if origin is _Origin.USER else ""
    if origin is _Origin.LIGHTNING:
        name = origin
    elif any(code is each for each in _LOOP):
        name = _Origin.LOOP
    if len(_seen) >= MOST_SEEN:
        _seen.clear()
    _seen[id(code)] = code, name
    return code, name
