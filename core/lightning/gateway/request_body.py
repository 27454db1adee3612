"""The body of a request: what it may take of the server's memory and time, and how it is read, whatever it was compressed with.

The invariant: a body is counted as it arrives and as it is unpacked, by its bytes and by the values that it would be parsed
into, and nothing of it is parsed before that was granted; what was granted is given back when the request has been answered.
Every route of every port that takes a body reads it here, behind `connections.Entrance`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import zstandard
from starlette.types import Message, Receive, Scope

from lightning.gateway.http import ClientGoneError, RefusalError
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
LONGEST_LENGTH = 18
"""Digits of a length that is read as one."""
RAISE_THE_LIMIT = "raise gateway.max_body_bytes"
PIECE = 64 * 1024
"""Bytes that are unpacked at a time, so that others have their turn between."""
PARTS = 1024
"""Steps of a decoder that have a turn, where they make less than that."""
GZIP = 31
"""What zlib calls a body with the header of gzip, and the largest window."""
ZSTD_STEP = 64
"""Bytes of zstd that are unpacked at a time: they can become 2 MB, and the library knows no limit of its own."""
ZSTD_WINDOW = 8 << 20
"""The memory that a decoder of zstd needs at most; RFC 9659 allows no more for what is sent over HTTP."""


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


async def read_body(scope: Scope, receive: Receive, limit: int, cure: str = RAISE_THE_LIMIT) -> bytes:
    """The whole request body, unpacked. Raises `RefusalError` (413, which names the `cure`) above `limit` bytes, 415 for an
    encoding that is not known and 400 for one that is broken, `ClientGoneError` when it is cut off."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LONGEST_LENGTH:
                raise RefusalError(400, "bad_length", "The header content-length is no number of bytes; send one.")
            if int(value) > limit:
                raise _too_large(int(value), limit, cure)
    encoding, held = _encoding(scope), scope.get(KEY)
    if not encoding:
        return await _received(receive, limit, cure)
    payload = await _received(receive if held is None else held.receive_packed, limit, cure)
    data = await _unpacked(encoding, payload, limit, cure, held)
    if held is not None:
        held.give(len(payload))
    return data


async def _received(receive: Receive, limit: int, cure: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(size, limit, cure)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _encoding(scope: Scope) -> str:
    """What the body is compressed with; empty for nothing. Raises `RefusalError` (415)."""
    said = b",".join(value for name, value in scope["headers"] if name == b"content-encoding").decode("latin-1").lower()
    named = [name for part in said.split(",") if (name := part.strip()) not in ("", "identity")]
    if not named:
        return ""
    if len(named) > 1 or named[0] not in READERS:
        message = f"The body's content-encoding is {said!r:.80}, which is not read here; send {SENDABLE}, or none."
        raise RefusalError(415, "unsupported_encoding", message, [(b"accept-encoding", SENDABLE.encode())])
    return named[0]


async def _unpacked(encoding: str, payload: bytes, limit: int, cure: str, held: RequestBody | None) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        for part in _pieces(encoding, payload):
            size += len(part)
            if size > limit:
                raise _too_large(size, limit, cure)
            if held is not None:
                await held.hold(part)
            parts.append(part)
            await asyncio.sleep(0)
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        message = f"The body is not {encoding}, as its header content-encoding says: {error}."
        raise RefusalError(400, "bad_encoding", message) from error
    return b"".join(parts)


def _pieces(encoding: str, payload: bytes) -> Iterator[bytes]:
    """What a body holds, a piece at a time. Raises what the decoders raise, `EOFError` for one that is cut off."""
    parts: list[bytes] = []
    size = 0
    for part in READERS[encoding](payload) if payload else ():
        parts.append(part)
        size += len(part)
        if size >= PIECE or len(parts) >= PARTS:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def _zlib(payload: bytes, wbits: int) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits)
    for start in range(0, len(payload), PIECE):
        data = payload[start : start + PIECE]
        while data:
            if stream.eof:  # several, one after another, are one body
                stream = zlib.decompressobj(wbits)
            yield stream.decompress(data, PIECE)
            data = stream.unused_data or stream.unconsumed_tail
    while rest := stream.decompress(b"", PIECE):
        yield rest
    if not stream.eof:
        raise EOFError("it is cut off")


def _deflate(payload: bytes) -> Iterator[bytes]:
    """With zlib's header, as the standard has it, or without, as some clients do."""
    return _zlib(payload, 15 if payload[0] & 0x0F == zlib.DEFLATED else -15)


def _zstd(payload: bytes) -> Iterator[bytes]:
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame = unpacker.decompressobj()
    for start in range(0, len(payload), ZSTD_STEP):
        data = payload[start : start + ZSTD_STEP]
        while data:
            if frame.eof:
                frame = unpacker.decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
    if not frame.eof:
        raise EOFError("it is cut off")


READERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": partial(_zlib, wbits=GZIP),
    "x-gzip": partial(_zlib, wbits=GZIP),
    "deflate": _deflate,
    "zstd": _zstd,
}
SENDABLE = "gzip, deflate, zstd"


def _too_large(size: int, limit: int, cure: str) -> RefusalError:
    message = f"The request's body has {size} bytes or more, the limit is {limit}; {cure}."
    return RefusalError(413, "body_too_large", message)
