"""Carries the current rollout and the agents' names into new threads and tasks: by `threading.Thread`,
`ThreadPoolExecutor.submit` (so `loop.run_in_executor`), and `loop.create_task` (so `asyncio.gather`, `wait_for` and task
groups).

The invariant: only lightning's own variables are set in a thread's context, so those of the user and the framework are as
without lightning. Outside a rollout threads and a pool's work start as usual, and the undo restores the original functions. The
starter's context is kept aside: its caller is determined only if a model call in the thread has no name by a framework.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

from lightning.instrument.adapter_tools import ReplacedMethods
from lightning.instrument.components import component_path, only_around
from lightning.instrument.context import attempt_in_context
from lightning.instrument.frames import start_task, thread_started_by, user_functions
from lightning.instrument.last_call import Starter, known_as, started_in, starter

P = ParamSpec("P")
R = TypeVar("R")


def _carried(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs `function` in another thread with the rollout and names of the current code; outside a
    rollout the function itself."""
    attempt = attempt_in_context()
    if attempt is None:
        return function
    here = Starter(copy_context(), attempt, component_path(), left_behind=not attempt.open)
    functions = user_functions()

    @functools.wraps(function, updated=())
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with known_as(starter, here), started_in(here.context), thread_started_by(functions):
            return function(*args, **kwargs)

    return run


def _start(original: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    # A pool's thread gets rollout and names with each work that is submitted, not when it starts.
    pool = getattr(sys.modules.get("concurrent.futures.thread"), "_worker", None)
    if getattr(thread, "_target", None) is not pool and not thread.ident:
        function = _carried(thread.run)
        if function is not thread.run and "run" not in vars(thread):

            def run() -> None:
                del thread.run
                function()

            thread.run = run  # type: ignore[method-assign]  # until it runs
    original(thread)


def _submit(
    original: Callable[..., Future[object]],
    pool: object,
    function: Callable[..., object],
    /,
    *args: object,
    **kwargs: object,
) -> Future[object]:
    return original(pool, _carried(function), *args, **kwargs)


def _create_task(original: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    if attempt_in_context() is None:
        return original(*args, **kwargs)
    with only_around():
        return start_task(original, *args, **kwargs)


def carry_names() -> Callable[[], None]:
    """Carry the rollout and the names into threads and tasks that start from now on; return the undo."""
    replaced = ReplacedMethods()
    replaced.replace(threading.Thread, "start", _start)
    replaced.replace(ThreadPoolExecutor, "submit", _submit)
    replaced.replace(asyncio.BaseEventLoop, "create_task", _create_task)
    if (uvloop := sys.modules.get("uvloop")) is not None:  # the event loop of agents in the trainer's process
        replaced.replace(uvloop.Loop, "create_task", _create_task)
    return replaced.put_back
