"""The gate that a weight update closes: requests that arrive meanwhile wait instead of failing.

The invariant: while a hold is active nothing new is sent to a policy server, and no call that ends meanwhile is recorded
before its tokens' versions are known; when the last hold ends everything that waited goes on, in the order it came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from lightning.gateway.errors import RefusalError

UPDATING = "The policy's weights are being updated"


class Gate:
    """Open unless at least one hold is active. `timeout` is how many seconds a call may wait in all; `waiting` counts calls."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._holds: dict[object, str] = {}
        self._news = asyncio.Event()
        self.waiting = 0

    @property
    def closed(self) -> bool:
        """Whether a hold is active."""
        return bool(self._holds)

    def close(self, holder: object, why: str = UPDATING) -> None:
        """Close the gate until `holder` opens it again; `why` begins the message of those who wait too long."""
        self._holds[holder] = why

    def open(self, holder: object) -> None:
        """End the hold of `holder`, if it has one."""
        if self._holds.pop(holder, None) is not None and not self._holds:
            self._news.set()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Close the gate for the length of the block. Holds may overlap."""
        holder = object()
        self.close(holder)
        try:
            yield
        finally:
            self.open(holder)

    def stir(self) -> None:
        """What calls wait for in `settle` may have come true."""
        self._news.set()

    async def wait(self, spent: float = 0.0) -> float:
        """Return at once when open, else when the hold ends; the answer is how many seconds a call has waited now.

        `spent` are those it had waited before. Raises `RefusalError` (503) when it has waited too long in all.
        """
        if not self._holds:
            return spent
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.waiting += 1
        try:
            await self._until(lambda: not self._holds, self.timeout - spent)
        except TimeoutError:
            why = next(iter(self._holds.values()), UPDATING)
            raise RefusalError(
                503,
                "held_too_long",
                f"{why} and this took longer than {self.timeout:g} s. "
                "Send the request again; if updates are this slow, raise gateway.hold_timeout.",
                [(b"retry-after", b"1")],
            ) from None
        finally:
            self.waiting -= 1
        return spent + loop.time() - began

    async def settle(self, settled: Callable[[], bool]) -> bool:
        """Wait for the same, or until `settled`, but no longer than the timeout; return whether either came true."""
        if self._holds and not settled():
            with contextlib.suppress(TimeoutError):
                await self._until(lambda: not self._holds or settled(), self.timeout)
        return not self._holds or settled()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not done():  # another hold may have begun before this one woke up
                self._news.clear()
                await self._news.wait()
