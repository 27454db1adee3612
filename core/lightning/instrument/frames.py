"""Which of the user's functions are running right now, outermost first; or which had started what runs.

The invariant: the answer does not depend on how the agent is run (main thread, thread, task, worker process): functions
of installed packages, of the standard library and of lightning are left out; whatever called lightning's runner, or runs
the event loop that the runner's tasks live in, is not part of the agent. A task or thread in which no function of the user's
runs, such as `asyncio.gather(client.create())`, is that of the functions which started it.
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
"""Names kept of a deep recursion, the innermost ones: the path travels in a header."""
MOST_SEEN = 4096
"""Functions, and files, of which it is known what they are."""

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
"""What stands between the agent and the question who is calling."""
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


def _plain(qualified: str) -> str:
    """`Writer.draft` as it is; `make.<locals>.agent` as `agent`; nothing for `<lambda>`, `<genexpr>` and `<module>`."""
    name = qualified.rpartition("<locals>.")[2]
    return "" if "<" in name else name


class _Thread(threading.local):
    started_by: tuple[str, ...] = ()


_thread = _Thread()
_started_by: ContextVar[tuple[int, tuple[str, ...]]] = ContextVar("lightning_started_by", default=(0, ()))
"""The thread that started this task, and its functions."""


def user_functions(above: int = 1) -> tuple[str, ...]:
    """Qualified names of the user's functions on the stack, outermost first; without any, those that started this task or
    thread. At most `MAX_DEPTH` innermost ones. `above` is the first frame to look at: 1 is the caller's."""
    names = _on_stack(sys._getframe(above))  # noqa: SLF001 — the one way to the stack that builds no list of all frames
    if names:
        return names
    thread, functions = _started_by.get()
    here = (
        threading.get_ident()
    )  # `asyncio.to_thread` takes the context of a task along, into a thread that was started later
    return functions if thread == here else _thread.started_by or functions


def start_task(start: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Start a task: what runs in it has been started by the user's functions that run now."""
    with known_as(_started_by, (threading.get_ident(), user_functions())):
        return start(*args, **kwargs)


@contextmanager
def thread_started_by(functions: tuple[str, ...]) -> Iterator[None]:
    """What runs in the block, in this thread, has been started by these functions."""
    before, _thread.started_by = _thread.started_by, functions
    try:
        yield
    finally:
        _thread.started_by = before


def _on_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Below an event loop stands either an agent that runs a loop of its own, and below that the runner; or whoever runs the
    program, in which case nobody below the loop is calling."""
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
"""What frames of a code are called, by the id of the code, which is kept so that no other gets it. Hashes of codes are slow."""


def _look(code: CodeType) -> tuple[CodeType, _Name]:
    """The name of a user's function, empty without a name and for a library's; or what else a frame of this code says."""
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
