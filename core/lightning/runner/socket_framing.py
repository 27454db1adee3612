"""Messages over a socket: four bytes of length (big endian), then the payload.

The invariant: a message is read whole or not at all; a peer that went away reads as the end, never as a short message.
"""

from __future__ import annotations

import asyncio
import socket
import struct

MAX_FRAME = 256 * 1024 * 1024
"""Bytes; a longer announced length means that something else wrote to the socket."""

_LENGTH = struct.Struct("!I")


def pack(payload: bytes) -> bytes:
    """A payload as it goes over the wire. Raises `ValueError` when it is too long."""
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a message of {len(payload)} bytes is longer than {MAX_FRAME}")
    return _LENGTH.pack(len(payload)) + payload


def unpack(buffer: bytearray) -> bytes | None:
    """Take the first whole message out of a receive buffer; None when none is complete yet."""
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _length(buffer[: _LENGTH.size])
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return payload


def send(sock: socket.socket, payload: bytes) -> None:
    """Send a message on a blocking socket."""
    sock.sendall(pack(payload))


def receive(sock: socket.socket) -> bytes | None:
    """The next message from a blocking socket; None when the peer is gone."""
    head = _receive_exactly(sock, _LENGTH.size)
    return None if head is None else _receive_exactly(sock, _length(head))


async def read(reader: asyncio.StreamReader) -> bytes:
    """The next message from a stream. Raises `asyncio.IncompleteReadError` when the peer is gone."""
    return await reader.readexactly(_length(await reader.readexactly(_LENGTH.size)))


def _length(head: bytes | bytearray) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME:
        raise ValueError(f"a message of {length} bytes was announced, more than {MAX_FRAME}")
    return length


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < count:
        data = sock.recv(min(count - len(buffer), 1 << 20))
        if not data:
            return None
        buffer += data
    return bytes(buffer)
