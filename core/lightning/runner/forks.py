"""Processes that an agent forks by itself (`os.fork`).

The invariant: the agent's own process alone comes back from its code. A child that does ends there, as a program would: with
what it has printed, with the code of its `sys.exit`, and with one line that says so.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def without_children() -> Iterator[None]:
    """Nothing but this process leaves the block: a child that was forked inside, and returns from it or raises, ends."""
    process, error = os.getpid(), None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != process:
            _end(process, error)


def flush() -> None:
    """Write out what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the agent may have put anything there or closed it, or nobody reads it any more
            stream.flush()


def _end(parent: int, error: BaseException | None) -> NoReturn:
    code = 0 if error is None else 1
    try:
        how = "returned from" if error is None else f"raised {type(error).__name__} out of"
        said = "" if error is None else "".join(traceback.format_exception(error))
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            said = "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"
        sys.stderr.write(
            f"{said}lightning: process {os.getpid()}, which the agent forked in process {parent}, {how} the agent's code and "
            "was ended: the agent's own process alone gives the reward. End such a child with os._exit()\n"
        )
    finally:
        try:
            flush()
        finally:
            os._exit(code & 0xFF)
