"""What the body of a request may take of the server's memory and time.

The invariant: a body is counted as it arrives, by its bytes and by the values that it would be parsed into, and nothing of it
is parsed before that was granted; what was granted is given back when the request has been answered. Every route of every port
that reads a body is behind this (`access_control.Guard`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.types import Message, Receive, Scope

from lightning.gateway.http import RefusalError
from lightning.memory_budget import LONG, MANY, VALUE_BYTES, Budget, Holder, json_values

T = TypeVar("T")

KEY = "lightning.body"
"""Under this name the scope of a request has its `RequestBody`."""
OTHERS_VALUES = 4
"""A body that is no model call may have so many times the JSON values: of spans, of many rollouts."""
COPIES = 3
"""How often a body is there: as it came, as what it was parsed into, and as it is sent on or stored."""
WAIT = 10.0
"""Seconds that a body waits for room."""


class RequestBody:
    """What one request holds of its token's share. `most_values` is 0 for no limit."""

    __slots__ = ("_budget", "_bytes", "_held", "_holder", "_most_values", "_receive", "_values")

    def __init__(self, budget: Budget, holder: Holder, most_values: int, receive: Receive) -> None:
        self._budget, self._holder, self._receive = budget, holder, receive
        self._most_values = most_values
        self._held = self._values = self._bytes = 0

    @property
    def is_large(self) -> bool:
        """Whether working on it takes long."""
        return self._bytes > LONG or self._values > MANY

    def is_no_call(self) -> None:
        """Its route says so before it reads it: it may have more values than a model call."""
        self._most_values *= OTHERS_VALUES

    async def receive(self) -> Message:
        """The next message of the request. Raises `RefusalError` (413, 429) for a body that there is no room for."""
        message = await self._receive()
        if body := message.get("body"):
            await self.hold(body)
        return message

    async def receive_packed(self) -> Message:
        """The next message of a request whose body is compressed: what it will be is not known, only its bytes. Raises as
        `receive` does."""
        message = await self._receive()
        await self.reserve(len(message.get("body", b"")))
        return message

    async def hold(self, data: bytes) -> None:
        """Count a part of a body. Raises `RefusalError`."""
        values = json_values(data)
        self._values += values
        self._bytes += len(data)
        if self._most_values and self._values > self._most_values:
            message = (
                f"The request's body has more than {self._most_values} JSON values, counted by commas and brackets "
                "(gateway.limits.json_values): send fewer."
            )
            raise RefusalError(413, "too_many_values", message)
        await self.reserve(COPIES * len(data) + VALUE_BYTES * values)

    async def reserve(self, size: int) -> None:
        """Hold so many bytes until the request has been answered, or `give` them back. Raises `RefusalError`."""
        if self._held + size > self._budget.largest:
            message = (
                f"The request would take {self._held + size} bytes of memory or more, and one may take "
                f"{self._budget.largest} (half of gateway.limits.body_memory): send less."
            )
            raise RefusalError(413, "body_too_large", message)
        if not await self._holder.wait(size, WAIT):
            message = (
                f"The bodies of this token's requests hold {self._holder.held} bytes, and there was no room for more in "
                f"{WAIT:g} s (gateway.limits.body_memory). Wait and send it again."
            )
            raise RefusalError(429, "too_many_bytes", message, [(b"retry-after", b"1")])
        self._held += size

    def give(self, size: int) -> None:
        """Let go of what was reserved."""
        self._held -= size
        self._holder.give(size)

    def close(self) -> None:
        """The request has been answered."""
        self.give(self._held)

    async def work(self, do: Callable[[], T]) -> T:
        """Do something that takes long beside the event loop (`Holder.work`)."""
        return await self._holder.work(do)


async def beside(scope: Scope, do: Callable[[], T]) -> T:
    """Do something with a body that was read: here when that is short, else beside the event loop."""
    body: RequestBody | None = scope.get(KEY)
    return do() if body is None or not body.is_large else await body.work(do)
