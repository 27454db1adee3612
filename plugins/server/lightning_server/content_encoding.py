"""Decompression of request bodies, before a route reads them.

The invariant: a compressed body is counted as it arrives and as it is decompressed. A route gets it piece by piece and checks
its own limit at each; the memory budget of bodies grants each piece before the next one is decompressed. So the limits of bytes
and of JSON values are those of an uncompressed body.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

import zstandard
from lightning.gateway.http import KEY, RefusalError, RequestBody
from starlette.types import Message, Receive, Scope

PIECE = 64 * 1024
"""Bytes that are decompressed at a time; other requests are served between two pieces."""
PARTS = 1024
"""A decoder's steps that are joined into one piece at most, when they yield less than `PIECE` bytes."""
GZIP = 31
"""The `wbits` of zlib for a body with gzip's header and the largest window."""
ZSTD_STEP = 64
"""Compressed bytes given to the zstd decoder at a time. They can become 2 MB, and the library has no limit on its output."""
ZSTD_WINDOW = 8 << 20
"""The largest window of a zstd decoder in bytes; RFC 9659 allows no more over HTTP."""
SENDABLE = "gzip, deflate, zstd"
DISCONNECTED: Message = {"type": "http.disconnect"}


def unpacking(scope: Scope, receive: Receive, encodings: Sequence[str]) -> Receive:
    """Return a `receive` that gives a route the decompressed body; the scope's header `content-encoding` is removed. It raises
    `RefusalError`: 415 for an unknown encoding, 400 for a broken body, and those of `RequestBody`."""
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
    messages = _unpacked(encodings, scope[KEY])

    at_its_end = False

    async def unpacked() -> Message:
        nonlocal at_its_end
        if at_its_end:
            return await receive()
        # A route that was cancelled while it received has lost a part of the body: it does not get the rest as a whole one.
        message = await anext(messages, DISCONNECTED)
        at_its_end = not message.get("more_body", False) and message is not DISCONNECTED
        return message

    return unpacked


async def _unpacked(encodings: Sequence[str], held: RequestBody) -> AsyncIterator[Message]:
    encoding = ", ".join(encodings)
    if encoding not in READERS:
        why = f"The body's content-encoding is {encoding!r:.80}, which is not read here; send {SENDABLE}, or none."
        raise RefusalError(415, "unsupported_encoding", why, [(b"accept-encoding", SENDABLE.encode())])
    parts: list[bytes] = []
    more = True
    while more:
        message = await held.receive_packed()
        if message["type"] == "http.disconnect":
            yield message
            return
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        yield _message(b"")  # the route looks at how much has come, and knows how much it takes
    payload = b"".join(parts)
    parts.clear()
    try:
        for piece in _pieces(encoding, payload):
            yield _message(piece)
            await held.hold(piece)
            await asyncio.sleep(0)
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        why = f"The body is not {encoding}, as its header content-encoding says: {error}."
        raise RefusalError(400, "bad_encoding", why) from error
    held.give(len(payload))
    payload = piece = b""  # while the route goes on with the request, nothing of them is kept
    yield _message(b"", more=False)


def _message(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def _pieces(encoding: str, payload: bytes) -> Iterator[bytes]:
    """Yield a body decompressed, piece by piece. Raises the decoder's errors, and `EOFError` for a body that is cut off."""
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
    """Decompress deflate with zlib's header, as the standard says, or without, as some clients send it."""
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
