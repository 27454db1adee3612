"""Streams that nobody meant: cut anywhere, without end, of the wrong shape, or no JSON at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.gateway import Upstream, http
from lightning.gateway.answers import SHAPE_ERRORS
from lightning.gateway.dialects import DIALECTS, Capture
from lightning.gateway.http import EventCutter, UpstreamError, data_of
from lightning.types import CallStatus

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
PIECES = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"data: ", b"data:", b"data", b":", b" ", b"x", b"{", b"\x00", b"\xff"]),
    max_size=40,
)


def cut(payload: bytes, places: list[int]) -> Iterator[bytes]:
    marks = sorted({place % (len(payload) + 1) for place in places} | {0, len(payload)})
    return (payload[a:b] for a, b in itertools.pairwise(marks))


@settings(max_examples=100)
@given(pieces=PIECES, places=st.lists(st.integers(0, 200), max_size=20))
def test_junk_says_the_same_wherever_it_is_cut(pieces, places):
    """Whatever line ends are mixed: the payloads do not depend on the network's packets."""
    payload = b"".join(pieces)
    whole, parts = EventCutter(), EventCutter()
    at_once = whole.feed(payload)
    in_parts = [event for piece in cut(payload, places) for event in parts.feed(piece)]
    assert b"".join(in_parts) + parts.rest() == payload
    assert payloads(in_parts) == payloads(at_once)


def payloads(events):
    return [data for event in events if (data := data_of(event)) is not None]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", [b"x", b"\n", b"\r", b"data: y\n", b"\r\n"])
def test_bytes_that_come_one_by_one_take_time_that_grows_with_their_number_alone(piece):
    """Were the buffer searched from its beginning each time, this would take hours."""
    cutter = EventCutter()
    seen = 0
    for _ in range(40_000 // len(piece)):
        for byte in piece:
            seen += sum(map(len, cutter.feed(bytes([byte]))))
    assert seen + len(cutter.rest()) == 40_000 // len(piece) * len(piece)


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(http, "LONGEST_EVENT", 1000)
    cutter = EventCutter()
    assert len(cutter.feed(b"data: " + b"x" * 990)) == 0
    with pytest.raises(UpstreamError, match="an event of more than 1000 bytes"):
        cutter.feed(b"x" * 10)
    assert len(EventCutter().feed(b"data: " + b"x" * 5000 + b"\n\n")) == 1  # what is complete is not held


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALL = st.fixed_dictionaries({}, optional={"id": JSON, "index": JSON, "function": JSON | st.just({"arguments": "{}"})})
SAID = st.fixed_dictionaries({}, optional={"content": JSON, "tool_calls": JSON | st.lists(CALL, max_size=2)})
LOGPROBS = st.fixed_dictionaries({}, optional={"content": JSON, "token_logprobs": JSON})
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": JSON,
        "token_ids": JSON | st.lists(st.integers(), max_size=3),
        "prompt_token_ids": JSON,
        "logprobs": JSON | LOGPROBS,
        "finish_reason": JSON,
        "delta": JSON | SAID,
        "message": JSON | SAID,
        "text": JSON,
    },
)
ANSWER = st.fixed_dictionaries(
    {}, optional={"id": JSON, "prompt_token_ids": JSON, "choices": JSON | st.lists(CHOICE, max_size=2), "usage": JSON}
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
@settings(max_examples=60)
@given(answers=st.lists(ANSWER | JSON, max_size=3), stream=st.booleans())
def test_answers_of_any_shape_are_read_or_called_misshapen(dialect, answers, stream):
    """Nothing else than what `CallEndpoint` takes for a fault of the policy server escapes."""
    capture = Capture("id")
    plan = None
    for answer in answers:
        try:
            dialect.read(answer, capture)
            plan = plan or dialect.plan({**HI, "prompt": "hi"})
            if stream:
                dialect.exists_only_for_us(answer, plan)
            dialect.strip(answer, plan)
            capture.finished(1)
        except (*SHAPE_ERRORS, UpstreamError):
            break


@asynccontextmanager
async def junk_server(answer: list[bytes]) -> AsyncIterator[str]:
    """Answers every request with these pieces, each in a packet of its own, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        else:  # what it is asked beside calls: that it is well, and which model it serves
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "tiny"}]}')
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for piece in answer:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def junk(rng: random.Random) -> list[bytes]:
    """A stream that begins like vLLM's and then is not: values replaced, events cut, bytes of no encoding."""
    choice = {
        "index": rng.choice([0, 0, -1, 10**12, "0", None]),
        "delta": rng.choice([{"content": "x"}, {"content": 5}, {}, None, "x", {"tool_calls": [{"id": []}]}]),
        "token_ids": rng.choice([[1], [1, -1], [2**31], ["a"], None, 7, {"a": 1}]),
        "logprobs": rng.choice([{"content": [{"logprob": -0.5}]}, {"content": None}, None, [], {"content": [{}]}]),
        "finish_reason": rng.choice([None, None, "stop", 3, ""]),
    }
    chunk = rng.choice([{"choices": [choice]}, {"choices": {}}, [], {"error": {"message": "no"}}, {"error": 5}])
    events = [
        rng.choice([b"data: ", b"data:", b"event: x\ndata: ", b"", b": "])
        + rng.choice([json.dumps(chunk).encode(), b"[DONE]", b"{", b"\xff\xfe", b"[" * 5000, b"NaN"])
        + rng.choice([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n", b""])
        for _ in range(rng.randrange(1, 5))
    ]
    payload = b"".join(events)
    return list(cut(payload, [rng.randrange(len(payload) + 1) for _ in range(rng.randrange(4))]))


@pytest.mark.parametrize("seed", range(4))
async def test_a_policy_server_that_sends_junk_costs_the_call_and_nothing_else(build, caplog, seed):
    """Every answer ends, each call is recorded as what it was, and the gateway never fails by itself."""
    rng = random.Random(seed)
    answer: list[bytes] = []
    async with junk_server(answer) as url:
        house = await build(upstreams=[Upstream(url, "tiny")])
        http = await house.http()
        with caplog.at_level(logging.ERROR):
            for number in range(1, 11):
                answer[:] = junk(rng)
                reply = await http.post("/chat/completions", json={**HI, "stream": True})
                assert reply.status_code == 200
                found = await house.recorded(number)
                assert len(found) == number
                assert found[-1].status in (CallStatus.OK, CallStatus.ERROR)
                if found[-1].status is CallStatus.ERROR:
                    assert b"error" in reply.content
                else:
                    assert found[-1].finish_reason == "stop"
        assert "the gateway failed" not in caplog.text


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"messages":' + b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"", b"7"]
)
async def test_bodies_that_are_no_requests_are_refused(house, body):
    http = await house.http()
    reply = await http.post("/chat/completions", content=body)
    assert reply.status_code == 422
