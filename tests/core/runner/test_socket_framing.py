"""Messages come out as they went in, however the socket cuts them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.runner import socket_framing


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 20))
def test_messages_survive_any_cutting(messages: list[bytes], size: int) -> None:
    wire = b"".join(socket_framing.pack(message) for message in messages)
    buffer, received = bytearray(), []
    for start in range(0, len(wire), size):
        buffer += wire[start : start + size]
        while (message := socket_framing.unpack(buffer)) is not None:
            received.append(message)
    assert received == messages
    assert not buffer


def test_a_peer_that_goes_away_is_the_end_not_a_short_message() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket_framing.send(theirs, b"whole")
            theirs.sendall(socket_framing.pack(b"broken off")[:-1])
        assert socket_framing.receive(ours) == b"whole"
        assert socket_framing.receive(ours) is None


async def test_a_length_that_cannot_be_is_an_error() -> None:
    nonsense = b"\xff" * 8
    with pytest.raises(ValueError, match="was announced"):
        socket_framing.unpack(bytearray(nonsense))
    reader = asyncio.StreamReader()
    reader.feed_data(nonsense)
    with pytest.raises(ValueError, match="was announced"):
        await socket_framing.read(reader)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_framing, "MAX_FRAME", 3)
    with pytest.raises(ValueError, match="longer than 3"):
        socket_framing.pack(b"1234")
