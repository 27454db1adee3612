"""Messages over a socket: four bytes of length (big endian), then the payload.

The invariant: a message is read whole or not at all; a closed connection reads as the end, never as a short message. Messages
of an agent's process are limited in length and in memory before they are read, and in the number of JSON values before they are
parsed. A request and its reply begin with the same name, so that no reply is taken for that of another request.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from lightning.memory_budget import VALUE_BYTES, Holder, json_values

MAX_FRAME = 256 * 1024 * 1024
"""Most bytes of a message. A longer announced length means that something else wrote to the socket."""
LONGEST_REPLY = 32 * 1024 * 1024
"""Most bytes of the report of a rollout from an agent's process."""
MOST_VALUES = 500_000
"""Most JSON values of such a report, counted by commas and brackets."""
LONGEST_NEWS = 1024 * 1024
"""Most bytes of a message from the fork server, which has run the imports of the agent's modules."""

NAME = 8
"""Bytes of the name that a request and its reply begin with."""

_LENGTH = struct.Struct("!I")


def pack(payload: bytes) -> bytes:
    """Return a payload with its length before it, as it is sent. Raises `ValueError` when it is too long."""
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a message of {len(payload)} bytes is longer than {MAX_FRAME}")
    return _LENGTH.pack(len(payload)) + payload


def unpack(buffer: bytearray, most: int = MAX_FRAME) -> bytes | None:
    """Take the first whole message out of a receive buffer; None when none is complete yet. Raises `ValueError` for one of more
    than `most` bytes."""
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _length(buffer[: _LENGTH.size], most)
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return payload


def send(sock: socket.socket, payload: bytes) -> None:
    """Send a message on a blocking socket."""
    sock.sendall(pack(payload))


def receive(sock: socket.socket) -> bytes | None:
    """Return the next message from a blocking socket; None when the peer is gone."""
    head = _receive_exactly(sock, _LENGTH.size)
    return None if head is None else _receive_exactly(sock, _length(head))


async def read_reply(reader: asyncio.StreamReader, holder: Holder, name: bytes) -> bytes:
    """Return the reply of an agent's process to the request `name`, read from a stream. `holder` waits for the memory that the
    reply and its parsed JSON take.

    Raises `asyncio.IncompleteReadError` when the peer is gone, and `ValueError` for a message that is too long, has too many
    values, or replies to another request.
    """
    length = _length(await reader.readexactly(_LENGTH.size), LONGEST_REPLY + NAME) - NAME
    if length < 0 or await reader.readexactly(NAME) != name:
        raise ValueError("a message that does not reply to this rollout's request")
    # All at once: two readers that hold their bytes and wait for memory for the values could wait for each other.
    held = max(length, min(length + VALUE_BYTES * min(length, MOST_VALUES), holder.largest))
    if not await holder.wait(held, None):
        raise ValueError(f"a message needs {held} bytes of memory, more than there may be for one")
    reply = await reader.readexactly(length)
    if (values := json_values(reply)) > MOST_VALUES:
        raise ValueError(f"a message has {values} JSON values, more than {MOST_VALUES}")
    if (needed := length + VALUE_BYTES * values) > held:
        raise ValueError(f"a message needs {needed} bytes of memory, more than there may be for one")
    holder.give(held - needed)
    return reply


def _length(head: bytes | bytearray, most: int = MAX_FRAME) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > most:
        raise ValueError(f"a message of {length} bytes was announced, more than {most}")
    return length


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < count:
        data = sock.recv(min(count - len(buffer), 1 << 20))
        if not data:
            return None
        buffer += data
    return bytes(buffer)
