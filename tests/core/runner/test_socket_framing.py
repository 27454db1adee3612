"""Messages come out as they went in, however the socket cuts them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.memory_budget import Budget, Holder
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
        await socket_framing.read_reply(reader, Holder(Budget()), ASKED)


ASKED = (7).to_bytes(socket_framing.NAME)


async def reply_of(payload: bytes, most: int = 1 << 20, name: bytes = ASKED) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(socket_framing.pack(name + payload))
    return await socket_framing.read_reply(reader, Holder(Budget(most)), ASKED)


@pytest.mark.parametrize("name", [(6).to_bytes(8), (8).to_bytes(8), b"", b"{}"])
async def test_a_reply_to_another_request_is_not_taken(name: bytes) -> None:
    with pytest.raises(ValueError, match="does not reply to this rollout's request"):
        await reply_of(b"9.0", name=name)


async def test_what_an_agent_sends_is_held_to_a_length_a_number_of_values_and_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_framing, "LONGEST_REPLY", 10_000)
    monkeypatch.setattr(socket_framing, "MOST_VALUES", 1000)
    assert await reply_of(b"[" * 1000) == b"[" * 1000
    with pytest.raises(ValueError, match="1001 JSON values, more than 1000"):
        await reply_of(b"[" * 1001)
    with pytest.raises(ValueError, match="10009 bytes was announced, more than 10008"):
        await reply_of(b" " * 10_001)
    with pytest.raises(ValueError, match="needs 129000 bytes of memory"):
        await reply_of(b"[" * 1000, most=200_000)


async def test_a_reply_waits_for_the_memory_that_others_hold() -> None:
    budget = Budget(1000)
    other = Holder(budget)
    assert other.take(500)
    reader = asyncio.StreamReader()
    reader.feed_data(socket_framing.pack(ASKED + b" " * 400))
    reading = asyncio.create_task(socket_framing.read_reply(reader, Holder(budget), ASKED))
    await asyncio.sleep(0.01)
    assert not reading.done()
    other.give(500)
    assert len(await reading) == 400


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_framing, "MAX_FRAME", 3)
    with pytest.raises(ValueError, match="longer than 3"):
        socket_framing.pack(b"1234")
