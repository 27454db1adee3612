"""The gate that a weight update closes: requests that arrive meanwhile wait instead of failing.

The invariant: while a hold is active nothing new is sent to a policy server, and no call that ends meanwhile is recorded
before its tokens' versions are known; when the last hold ends everything that waited goes on, in the order it came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from lightning.gateway.errors import RefusalError


class Gate:
    """Open unless at least one hold is active."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()
        self.waiting = 0

    @property
    def closed(self) -> bool:
        """Whether a hold is active."""
        return self._holds > 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Close the gate for the length of the block. Holds may overlap."""
        self._holds += 1
        self._open.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._open.set()

    async def wait(self) -> None:
        """Return at once when open, else when the hold ends. Raises `RefusalError` (503) after the timeout."""
        if self._open.is_set():
            return
        self.waiting += 1
        try:
            await self._until_open()
        except TimeoutError:
            raise RefusalError(
                503,
                "held_too_long",
                f"The policy's weights are being updated and this took longer than {self._timeout:g} s. "
                "Send the request again; if updates are this slow, raise gateway.hold_timeout.",
                [(b"retry-after", b"1")],
            ) from None
        finally:
            self.waiting -= 1

    async def settle(self) -> None:
        """Wait for the same, but go on after the timeout: for calls that are past vLLM already."""
        if not self._open.is_set():
            with contextlib.suppress(TimeoutError):
                await self._until_open()

    async def _until_open(self) -> None:
        async with asyncio.timeout(self._timeout):
            while not self._open.is_set():  # another hold may have begun before this one woke up
                await self._open.wait()
