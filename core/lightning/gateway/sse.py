"""Server-sent events cut out of a byte stream, whatever the chunk boundaries are.

The invariant: the pieces, joined, are exactly the bytes that came in; parsing never changes what is passed on, takes time that
grows with the bytes alone, and holds one unfinished event of bounded length.
"""

from __future__ import annotations

import re

from lightning.gateway.errors import UpstreamError

BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
LINE = re.compile(rb"\r\n|\n|\r")
LONGEST_BLANK = 4
LONGEST_EVENT = 64 << 20
"""Bytes; the longest there is has the ids of a whole prompt, at most eight bytes each."""


class EventCutter:
    """Feed it bytes, get back whole events, each with the blank line that ends it."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completed, in order. Raises `UpstreamError` for one without an end."""
        buffer = self._buffer
        search_from = max(0, len(buffer) - LONGEST_BLANK + 1)
        buffer += data
        events: list[bytes] = []
        start = 0
        for match in BLANK_LINE.finditer(buffer, search_from):
            events.append(bytes(buffer[start : match.end()]))
            start = match.end()
        if start:
            del buffer[:start]
        if len(buffer) > LONGEST_EVENT:
            raise UpstreamError(f"it sent an event of more than {LONGEST_EVENT} bytes")
        return events

    def rest(self) -> bytes:
        """What came after the last blank line: an event that was cut off, or nothing."""
        return bytes(self._buffer)


def data_of(event: bytes) -> bytes | None:
    """The payload of an event (its `data:` lines joined by newlines), or None for comments and other fields."""
    body = event.rstrip(b"\r\n")
    if body.startswith(b"data: ") and b"\n" not in body and b"\r" not in body:
        return body[6:]
    lines = [line[5:].removeprefix(b" ") for line in LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
