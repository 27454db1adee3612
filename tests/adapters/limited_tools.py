"""For tests of `runner.tool_limits` with each framework: limits as a runner sets them, and a tool that counts its runs."""

from __future__ import annotations

import asyncio
import fcntl
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from lightning.testing import Reply, ToolCall
from lightning_sandbox.tool_slots import limit_tools, make_slots

AT_ONCE = 4
SCRIPT = [
    Reply("", tool_calls=[ToolCall("search", '{"query": "tea"}', id=f"call-{n}") for n in range(AT_ONCE)]),
    "found",
]
"""The model asks for the tool several times at once, then answers."""


@contextmanager
def limited(folder: Path, runs: Mapping[str, int]) -> Iterator[None]:
    """Limits on a machine of its own, before adapters are installed."""
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        undo = limit_tools(make_slots(runs))
        try:
            yield
        finally:
            undo()


@contextmanager
def taken(folder: Path, name: str) -> Iterator[None]:
    """All slots of a tool, as another process has them."""
    with mock.patch.object(tempfile, "tempdir", str(folder)), ExitStack() as closing:
        for path in make_slots({name: 1}).files(name):
            fcntl.flock(closing.enter_context(path.open()), fcntl.LOCK_EX)
        yield


class Search:
    """The tool, which ends once as many runs of it as `enough` have been under way at once."""

    def __init__(self, enough: int) -> None:
        self.enough, self.now, self.peak = enough, 0, 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.now += 1
            self.peak = max(self.peak, self.now)

    def end(self) -> str:
        with self._lock:
            self.now -= 1
        return "tea is a drink"

    def run(self) -> str:
        self.begin()
        while self.peak < self.enough:
            time.sleep(0.001)
        return self.end()

    async def arun(self) -> str:
        self.begin()
        while self.peak < self.enough:
            await asyncio.sleep(0)
        return self.end()
