"""Which of the user's functions are on the stack right now, outermost first.

The invariant: the answer does not depend on how the agent is run (main thread, thread, task, worker process): functions
of installed packages, of the standard library and of lightning are left out; whatever called lightning's runner, or runs
the event loop that the runner's tasks live in, is not part of the agent.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
from enum import Enum
from functools import lru_cache
from pathlib import Path

import lightning
import lightning.instrument

MAX_DEPTH = 32
"""Names kept of a deep recursion, the innermost ones: the path travels in a header."""


class _Origin(Enum):
    USER = "user"
    LIBRARY = "library"
    LIGHTNING = "lightning"


def _folder(file: str | None) -> str:
    return str(Path(file or "").resolve().parent) + "/"


_LIGHTNING = _folder(lightning.__file__)
_ASKING = (_folder(lightning.instrument.__file__), _LIGHTNING + "plugins/", _folder(__file__))
"""What stands between the agent and the question who is calling."""
_LOOP = (asyncio.Runner.run.__code__, asyncio.BaseEventLoop.run_forever.__code__)
_LIBRARIES = tuple(
    str(Path(path).resolve()) + "/"
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
def _plain(qualified: str) -> str:
    """`Writer.draft` as it is; `make.<locals>.agent` as `agent`; nothing for `<lambda>`, `<genexpr>` and `<module>`."""
    name = qualified.rpartition("<locals>.")[2]
    return "" if "<" in name else name


def user_functions() -> tuple[str, ...]:
    """Qualified names of the user's functions on this stack, outermost first; at most `MAX_DEPTH` innermost ones.

    Below an event loop stands either an agent that runs a loop of its own, and below that the runner; or whoever runs the
    program, in which case nobody below the loop is calling.
    """
    names: list[str] = []
    above_loop: int | None = None
    frame = sys._getframe(1)  # noqa: SLF001 — the one way to the stack that builds no list of all frames
    while frame is not None and len(names) < MAX_DEPTH:
        origin = _origin(frame.f_code.co_filename)
        if origin is _Origin.LIGHTNING:
            return tuple(reversed(names))
        if origin is _Origin.USER and (name := _plain(frame.f_code.co_qualname)):
            names.append(name)
        elif above_loop is None and frame.f_code in _LOOP:
            above_loop = len(names)
        frame = frame.f_back  # type: ignore[assignment]  # the loop ends at None
    return tuple(reversed(names[:above_loop]))
