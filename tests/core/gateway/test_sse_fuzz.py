"""Streams that nobody meant: cut anywhere, without end, of the wrong shape, or no JSON at all."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import math
import random
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.config import GatewayConfig
from lightning.gateway import Upstream, http, upstream
from lightning.gateway import call as gateway_call
from lightning.gateway.call import SHAPE_ERRORS
from lightning.gateway.dialects import Capture, has_negative
from lightning.gateway.gateway import spoken
from lightning.gateway.http import EventCutter, UpstreamError, data_of
from lightning.policy_server.packed_logprobs import FIELD, pack
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


@pytest.mark.parametrize("dialect", spoken(GatewayConfig()), ids=lambda dialect: dialect.path)
@settings(max_examples=60)
@given(said=st.lists(ANSWER | JSON, max_size=3), stream=st.booleans())
def test_answers_of_any_shape_are_read_or_called_misshapen(dialect, said, stream):
    """Nothing else than what `CallEndpoint` takes for a fault of the policy server escapes."""
    capture = Capture("id")
    plan = None
    for answer in said:
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
async def junk_server(
    answer: list[bytes], head: str = "200 OK\r\ncontent-type: text/event-stream"
) -> AsyncIterator[str]:
    """Answers every request with these pieces, each in a packet of its own, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if asked.startswith(b"POST"):
            length = next(line for line in asked.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        else:  # what it is asked beside calls: that it is well, and which model it serves
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "tiny"}]}')
            writer.close()
            return
        writer.write(f"HTTP/1.1 {head}\r\nconnection: close\r\n\r\n".encode())
        for piece in answer:
            writer.write(piece)
            await asyncio.sleep(0)
            if writer.transport.is_closing():
                break
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


WRONG = {
    "a finish reason that is no text": {"finish_reason": 3},
    "a finish reason that is an object": {"finish_reason": {"a": 1}},
    "a tool call whose id is no text": {"tool_calls": [{"index": 0, "id": 5, "function": {"arguments": "{}"}}]},
    "more than one thing": {"finish_reason": 3, "tool_calls": {"a": 5}},
    "a place that was not asked for": {"index": 1},
    "a place below the first": {"index": -1},
    "a place that is a text": {"index": "0"},
    "a place that is true": {"index": True},
    "a negative token": {"token_ids": [-1]},
    "a fraction of a token": {"token_ids": [0.5]},
    "a token that is too large": {"token_ids": [2**31]},
    "a logprob that is not a number": {"logprobs": {FIELD: pack(array("f", [math.nan]))}},
    "an infinite logprob": {"logprobs": {"content": [{"token": "a", "logprob": 1e300, "bytes": []}]}},
    "a list of choices that is none": None,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_what_cannot_be_recorded_is_the_policy_servers_fault(build, caplog, wrong, stream):
    """Recorded as failed with nothing of it, never a fault of the gateway."""
    odd = dict(WRONG[wrong] or {})
    said = {"content": "x", "tool_calls": odd.pop("tool_calls", None)}
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "delta" if stream else "message": said, **odd}
    chunk = {"id": "x", "choices": WRONG[wrong] and [choice], "prompt_token_ids": [1]}
    text = json.dumps(chunk).encode()
    async with junk_server([b"data: " + text + b"\n\ndata: [DONE]\n\n" if stream else text]) as url:
        house = await build(upstreams=[Upstream(url, "tiny")])
        reply = await (await house.http()).post("/chat/completions", json={**HI, "stream": stream})
        (call,) = await house.recorded()
    assert reply.status_code == (200 if stream else 502)
    assert b"upstream_failed" in reply.content
    assert (call.status, len(call.response_ids), len(call.logprobs)) == (CallStatus.ERROR, 0, 0)
    assert "the gateway failed" not in caplog.text


async def test_a_stream_that_cannot_be_put_together_is_the_policy_servers_fault(build, caplog):
    calls = [{"index": 0, "id": "a"}, {"index": "x", "id": "b"}]
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "delta": {"tool_calls": calls}}
    async with junk_server([b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"]) as url:
        house = await build(upstreams=[Upstream(url, "tiny")])
        reply = await (await house.http()).post("/chat/completions", json={**HI, "stream": True})
        (call,) = await house.recorded()
    assert (call.status, b"upstream_failed" in reply.content) == (CallStatus.ERROR, True)
    assert "the gateway failed" not in caplog.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", [5, "same", "", None, ["a"]])
async def test_a_call_has_an_id_of_its_own_whatever_the_server_calls_it(build, name, stream):
    said = {"role": "assistant", "content": "x"}
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "delta" if stream else "message": said}
    text = json.dumps({"id": name, "choices": [choice], "prompt_token_ids": [1]}).encode()
    async with junk_server([b"data: " + text + b"\n\ndata: [DONE]\n\n" if stream else text]) as url:
        house = await build(upstreams=[Upstream(url, "tiny")])
        http = await house.http()
        replies = [await http.post("/chat/completions", json={**HI, "stream": stream}) for _ in range(2)]
        calls = await house.recorded(2)
    shown = [json.loads(reply.text.removeprefix("data: ").partition("\n\n")[0])["id"] for reply in replies]
    assert shown == [call.id for call in calls] == [reply.headers["x-request-id"] for reply in replies]
    assert len({*shown}) == 2
    assert {call.status for call in calls} == {CallStatus.OK}


ENDLESS = [b" " * 1000] * 100
PACKED = [gzip.compress(b" " * 100_000)]


@pytest.mark.parametrize(
    ("head", "answer", "stream", "why"),
    [
        ("200 OK", ENDLESS, False, "more than 5000 bytes"),
        ("200 OK", [b"[]," * 1000] * 100, False, "more JSON values than fit in memory: let the agent ask for fewer"),
        ("400 Bad Request", ENDLESS, False, "more than 5000 bytes"),
        ("500 Internal Server Error", ENDLESS, False, "more than 5000 bytes"),
        ("200 OK\r\ncontent-encoding: gzip", PACKED, False, "encoded as 'gzip'"),
        ("200 OK\r\ncontent-encoding: gzip", PACKED, True, "encoded as 'gzip'"),
        ("200 OK", [b": on and on\n\n"] * 1000, True, "a stream of more than 5000 bytes: let the agent ask for fewer"),
        ("200 OK", ENDLESS, True, "a stream of more than 5000 bytes"),
    ],
    ids=["whole", "values", "refusal", "error", "packed", "packed stream", "stream", "line"],
)
async def test_what_a_policy_server_sends_is_bounded(build, monkeypatch, head, answer, stream, why):
    monkeypatch.setattr(upstream, "LONGEST_ANSWER", 5000)
    monkeypatch.setattr(gateway_call, "LONGEST_STREAM", 5000)
    async with junk_server(answer, head) as url:
        house = await build(upstreams=[Upstream(url, "tiny")])
        reply = await (await house.http()).post("/chat/completions", json={**HI, "stream": stream})
        (call,) = await house.recorded()
    assert b"upstream_failed" in reply.content
    assert why in reply.text
    assert call.status is CallStatus.ERROR


@pytest.mark.parametrize("path", ["GET /models", "POST /messages/count_tokens"])
async def test_so_is_what_it_says_beside_calls(build, monkeypatch, path):
    monkeypatch.setattr(upstream, "LONGEST_ANSWER", 20)
    house = await build()
    verb, route = path.split()
    reply = await (await house.http()).request(verb, route, json={**HI, "max_tokens": 1})
    assert (reply.status_code, "more than 20 bytes" in reply.text) == (502, True)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"messages":' + b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"", b"7"]
)
async def test_bodies_that_are_no_requests_are_refused(house, body):
    http = await house.http()
    reply = await http.post("/chat/completions", content=body)
    assert reply.status_code == 422


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 150_000)))
def test_a_negative_id_is_seen_wherever_it_stands(ids):
    assert has_negative(array("i", ids)) == any(each < 0 for each in ids)
