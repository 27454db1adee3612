"""How much memory may be taken by what others send: the bytes that are read, and the values that they are parsed into.

The invariant: never more than the budget is held, and there is room for whoever holds little: nobody may hold more than is then
still free. So one holder has half of it at most, two a third each, and a newcomer always finds some.

What JSON becomes is counted before it is parsed, by its commas and opening brackets: a value has one of them at least, and
`[[],[],...]` takes thirty times its bytes as Python's objects. A text's commas count as well, which is on the safe side.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

VALUE_BYTES = 128
"""What a comma or bracket of JSON stands for as a Python object: an empty list has 64, a small object 232 for two of them."""
MEMORY_OF_BYTE = 8
"""Bytes of memory that a byte of a bounded answer may take."""
SHARE_OF_MEMORY = 8
"""The budget is an eighth of the memory unless it is set."""
ROUND_FIGURE = 8 << 30
"""Bytes of memory that are assumed where nothing says."""
LONG = 256 * 1024
"""Bytes of JSON from which on a body is worked on beside the event loop."""
MANY = 20_000
"""JSON values from which on a body is worked on beside the event loop."""
ORJSON_BYTES = 4096
"""Below this size a result of orjson takes more memory than it has bytes."""
REST = 9.0
"""Seconds that a holder's long work rests for each second of CPU time that it took."""
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def memory() -> int:
    """Bytes of the machine, or of the control group that this process is in."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        found = ROUND_FIGURE
    try:
        limit = CONTROL_GROUP.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return found
    return min(found, int(limit)) if limit.isdigit() else found


def json_values(data: bytes) -> int:
    """The commas and opening brackets of some JSON, or of a part of it: at most a few more than its values."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


async def bounded(parts: AsyncIterable[bytes], most: int) -> bytes | None:
    """All that comes, joined; None as soon as that is more than so many bytes, or would be parsed into values
    of more than `MEMORY_OF_BYTE` times the memory."""
    found, size, values, counted = list[bytes](), 0, 0, 0
    most_values = MEMORY_OF_BYTE * most // VALUE_BYTES
    async for part in parts:
        found.append(part)
        size += len(part)
        if size > most_values:  # shorter ones cannot have as many, and need no count
            values += sum(map(json_values, found[counted:]))
            counted = len(found)
        if size > most or values > most_values:
            return None
    return b"".join(found)


def compact(data: bytes) -> bytes:
    """The same bytes, in as much memory as they need: what orjson returns keeps four kilobytes, however short it is."""
    return bytes(memoryview(data)) if len(data) < ORJSON_BYTES else data


class Budget:
    """`most` bytes for all holders; None takes a share of the memory. Belongs to one event loop."""

    def __init__(self, most: int | None = None) -> None:
        self.most = memory() // SHARE_OF_MEMORY if most is None else most
        self.held = 0
        self._freed = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def thread(self) -> ThreadPoolExecutor:
        """Where long work is done: one thread of its own, since agents of the inline runner, who wait for it, may hold all of
        the loop's."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning-parse")
        return self._thread

    def close(self) -> None:
        """Let go of the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    @property
    def largest(self) -> int:
        """What one holder can have when nobody else holds anything."""
        return self.most // 2

    def give(self, size: int) -> None:
        """Let go of so many bytes."""
        self.held -= size
        self._freed.set()

    async def freed(self) -> None:
        """Return when somebody has let go of something."""
        self._freed.clear()
        await self._freed.wait()


class Holder:
    """One of those who share a budget: a token, or an agent's process."""

    __slots__ = ("__weakref__", "_budget", "_rests_until", "_turn", "held")

    def __init__(self, budget: Budget) -> None:
        self._budget, self.held = budget, 0
        self._turn: asyncio.Lock | None = None
        self._rests_until = 0.0

    @property
    def largest(self) -> int:
        """What it can have when nobody else holds anything."""
        return self._budget.largest

    @property
    def rests(self) -> bool:
        """Whether its long work has to wait for what it took before."""
        return self._rests_until > time.monotonic()

    def take(self, size: int) -> bool:
        """Hold so many bytes more, if there is room for them."""
        budget = self._budget
        if self.held + size > budget.most - budget.held - size:
            return False
        self.held += size
        budget.held += size
        return True

    async def wait(self, size: int, seconds: float | None) -> bool:
        """The same, with some seconds to wait for room (None: any time). False at once for what can never fit."""
        if self.take(size):
            return True
        if size > self._budget.largest:
            return False
        try:
            async with asyncio.timeout(seconds):
                while not self.take(size):
                    await self._budget.freed()
        except TimeoutError:
            return False
        return True

    def give(self, size: int) -> None:
        """Let go of so many bytes."""
        self.held -= size
        self._budget.give(size)

    async def work(self, do: Callable[[], T]) -> T:
        """Do something long in a thread: one at a time for this holder, and not more than a tenth of the time.

        Parsing holds the interpreter's lock, so that a thread alone would not leave the event loop its time.
        """
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if (rest := self._rests_until - time.monotonic()) > 0:
                await asyncio.sleep(rest)
            return await asyncio.get_running_loop().run_in_executor(self._budget.thread, partial(self._timed, do))

    def _timed(self, do: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return do()
        finally:
            self._rests_until = time.monotonic() + REST * (time.thread_time() - began)


class Holders:
    """The holders of one budget by name. One is remembered as long as it has something to be remembered for: while somebody
    works with it, and while it rests. Work is done in one thread, so that few rest at a time."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._known = WeakValueDictionary[bytes, Holder]()
        self._resting = list[Holder]()

    def of(self, name: bytes) -> Holder:
        """The holder of this name. Whoever asks gives it to `done` in the end."""
        holder = self._known.get(name)
        if holder is None:
            self._known[name] = holder = Holder(self._budget)
        return holder

    def done(self, holder: Holder) -> None:
        """Somebody has ended to work with it."""
        if holder.rests:
            self._resting = [holder, *(other for other in self._resting if other.rests and other is not holder)]

    def __len__(self) -> int:
        return len(self._known)
