"""Threads and tasks know who started them: `threading.Thread`, `ThreadPoolExecutor.submit`, and with it `loop.run_in_executor`;
`loop.create_task`, and with it `asyncio.gather`, `wait_for` and task groups.

The invariant: of a thread's context only lightning's own variables are set, so the user's and the framework's are what they
would be without us. Outside a rollout a thread and a pool's work begin as ever, and the undo puts the very functions back. The
starter's context is kept aside: who called there is asked only where a model call in the thread has no framework's name.
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
    """The function, to be run in another thread with the names of here; itself outside a rollout."""
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
    # A pool's thread serves whoever gives it work.
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
    """Carry the rollout and the names into threads and tasks that begin from now on; returns the undo."""
    replaced = ReplacedMethods()
    replaced.replace(threading.Thread, "start", _start)
    replaced.replace(ThreadPoolExecutor, "submit", _submit)
    replaced.replace(asyncio.BaseEventLoop, "create_task", _create_task)
    if (uvloop := sys.modules.get("uvloop")) is not None:  # on which agents run beside the trainer
        replaced.replace(uvloop.Loop, "create_task", _create_task)
    return replaced.put_back
