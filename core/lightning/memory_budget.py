"""Limits the memory that data from others may take: the bytes that are read, and the values that they are parsed into.

The invariant: never more than the budget is held, and a holder of little always finds room: nobody may hold more than is still
free then. So one holder has at most half of the budget, two have a third each, and a newcomer always gets some.

The values of JSON are counted before it is parsed, by commas and opening brackets: each value but the outermost follows one,
and `[[],[],...]` takes thirty times its bytes as Python's objects. Commas in texts count as well, which errs on the safe side.
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
"""Bytes of memory that are reserved for a comma or bracket of JSON: an empty list takes 64, a small object 232 for two of
them."""
MEMORY_OF_BYTE = 8
"""Bytes of memory that a byte of an answer read by `bounded` may take."""
SHARE_OF_MEMORY = 8
"""The budget is the memory divided by this number unless it is set."""
ROUND_FIGURE = 8 << 30
"""Bytes of memory that are assumed if the system does not tell."""
LONG = 256 * 1024
"""Bytes of JSON from which on a body is parsed beside the event loop."""
MANY = 20_000
"""JSON values from which on a body is parsed beside the event loop."""
ORJSON_BYTES = 4096
"""A result of orjson below this size takes more memory than it has bytes."""
REST = 9.0
"""Seconds that a holder's long work must pause for each second of CPU time that it took."""
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def memory() -> int:
    """Return the bytes of memory of the machine, or of this process's control group if it has fewer."""
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
    """Count the commas and opening brackets of some JSON, or of a part of it: about as many as it has values, or more."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


async def bounded(parts: AsyncIterable[bytes], most: int) -> bytes | None:
    """Join all parts. Return None as soon as they have more than `most` bytes, or would be parsed into values that take more
    than `MEMORY_OF_BYTE` times `most`."""
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
    """Copy short bytes so that they take no more memory than they need: a result of orjson keeps four kilobytes, however short
    it is."""
    return bytes(memoryview(data)) if len(data) < ORJSON_BYTES else data


class Budget:
    """A budget of `most` bytes for all holders; None takes a share of the memory. Belongs to one event loop."""

    def __init__(self, most: int | None = None) -> None:
        self.most = memory() // SHARE_OF_MEMORY if most is None else most
        self.held = 0
        self._freed = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def thread(self) -> ThreadPoolExecutor:
        """The one thread for long work. It is not one of the loop's threads, since agents of the inline runner, which wait for
        this work, may hold all of those."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning-parse")
        return self._thread

    def close(self) -> None:
        """Shut the thread down."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    @property
    def largest(self) -> int:
        """The bytes that one holder can have when nobody else holds any."""
        return self.most // 2

    def give(self, size: int) -> None:
        """Return this many bytes to the budget."""
        self.held -= size
        self._freed.set()

    async def freed(self) -> None:
        """Return when somebody has given bytes back."""
        self._freed.clear()
        await self._freed.wait()


class Holder:
    """One of those who share a budget: an API token, or an agent's process."""

    __slots__ = ("__weakref__", "_budget", "_rests_until", "_turn", "held")

    def __init__(self, budget: Budget) -> None:
        self._budget, self.held = budget, 0
        self._turn: asyncio.Lock | None = None
        self._rests_until = 0.0

    @property
    def largest(self) -> int:
        """The bytes that this holder can have when nobody else holds any."""
        return self._budget.largest

    @property
    def rests(self) -> bool:
        """Whether its next long work has to pause, because of the CPU time that it took before."""
        return self._rests_until > time.monotonic()

    def take(self, size: int) -> bool:
        """Hold this many bytes more if there is room for them; return whether there was."""
        budget = self._budget
        if self.held + size > budget.most - budget.held - size:
            return False
        self.held += size
        budget.held += size
        return True

    async def wait(self, size: int, seconds: float | None) -> bool:
        """Hold this many bytes more; wait for room up to `seconds` (None: any time). Return whether there was; False at once
        for a size that can never fit."""
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
        """Give this many bytes back."""
        self.held -= size
        self._budget.give(size)

    async def work(self, do: Callable[[], T]) -> T:
        """Do long work in the budget's thread: one piece at a time for this holder, in at most a tenth of the time.

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
    """The holders of one budget by name. A holder is kept only while somebody uses it and while it must pause. Long work is
    done in one thread, so that few pause at a time."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._known = WeakValueDictionary[bytes, Holder]()
        self._resting = list[Holder]()

    def of(self, name: bytes) -> Holder:
        """Return the holder of this name. The caller gives it to `done` at the end."""
        holder = self._known.get(name)
        if holder is None:
            self._known[name] = holder = Holder(self._budget)
        return holder

    def done(self, holder: Holder) -> None:
        """End the use of a holder, which is kept on while it must pause."""
        if holder.rests:
            self._resting = [holder, *(other for other in self._resting if other.rests and other is not holder)]

    def __len__(self) -> int:
        return len(self._known)
