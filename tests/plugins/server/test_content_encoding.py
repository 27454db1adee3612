"""Bodies that were compressed by their client are read on every route, and one that would become huge is not."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable

import httpx
import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestServer
from lightning.gateway.connections import Entrance
from lightning.gateway.http import KEY, RefusalError, RequestBody, packed_with, read_body
from lightning.instrument.context import trace_id_of
from lightning.memory_budget import Budget, Holders
from lightning.types import CallStatus
from lightning_otel.traces.store import spans
from lightning_record.config import ProviderConfig
from lightning_server.content_encoding import unpacking
from lightning_server.serving import Sessions

from tests.core.gateway.conftest import build, house

__all__ = ["build", "house"]

HI = [{"role": "user", "content": "hi there"}]
CALLS: dict[str, dict] = {
    "/chat/completions": {"messages": HI},
    "/completions": {"prompt": "hi"},
    "/responses": {"input": "hi"},
    "/messages": {"messages": HI, "max_tokens": 5},
}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def streamed_zstd(data: bytes) -> bytes:
    """As Codex does it: without the size in the header."""
    packer = zstandard.ZstdCompressor(level=3).compressobj()
    return packer.compress(data) + packer.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip, by another name": ("X-GZip", gzip.compress),
    "gzip in two members": ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "zstd": ("zstd", streamed_zstd),
    "zstd in two frames": ("identity, zstd", lambda data: zstandard.compress(data[:7]) + streamed_zstd(data[7:])),
    "nothing": ("identity", bytes),
}


@pytest.mark.parametrize("name", PACKED)
async def test_a_packed_call_is_the_plain_one(house, name):
    encoding, pack = PACKED[name]
    llm = await house.llm()
    http = await house.http(llm)
    for path, asked in CALLS.items():
        for content, headers in (
            (json.dumps(asked).encode(), {}),
            (pack(json.dumps(asked).encode()), {"content-encoding": encoding}),
        ):
            answer = await http.post(path, content=content, headers={"content-type": "application/json", **headers})
            assert answer.status_code == 200, answer.text
    calls, sent = await house.transitions(), house.fake.requests
    assert [call.status for call in calls] == [CallStatus.OK] * 8
    assert [list(call.prompt_ids) for call in calls[::2]] == [list(call.prompt_ids) for call in calls[1::2]]
    assert [request.body for request in sent[::2]] == [request.body for request in sent[1::2]]
    assert not [name for request in sent for name in request.headers if name == "content-encoding"]


@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("br", b"x", 415, "is 'br', which is not read here; send gzip, deflate, zstd, or none."),
        ("gzip, zstd", b"x", 415, "is 'gzip, zstd'"),
        ("gzip", b"{}", 400, "The body is not gzip, as its header content-encoding says"),
        ("zstd", b"{}", 400, "The body is not zstd, as its header content-encoding says"),
        ("deflate", b"{}", 400, "The body is not deflate, as its header content-encoding says"),
        ("gzip", gzip.compress(b"{}")[:-4], 400, "it is cut off"),
        ("zstd", zstandard.compress(b"{}" * 9)[:-4], 400, "it is cut off"),
        ("zstd", zstandard.compress(b"{}") + b"more", 400, "is not zstd"),
    ],
    ids=["br", "two", "no gzip", "no zstd", "no deflate", "half a gzip", "half a zstd", "more than zstd"],
)  # fmt: skip
async def test_what_cannot_be_unpacked_is_refused_by_name_and_recorded(house, encoding, body, status, words):
    http = await house.http()
    answer = await http.post("/messages", content=body, headers={"content-encoding": encoding})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
    assert (answer.headers.get("accept-encoding") == "gzip, deflate, zstd") is (status == 415)
    (call,) = await house.transitions()
    assert (call.status, words in call.error) == (CallStatus.REFUSED, True)
    assert not house.fake.requests


async def read(encoding: str, body: bytes, limit: int, *, at_once: int = 1 << 30, memory: int = 1 << 30) -> bytes:
    """What a route reads of a packed body that comes in messages of so many bytes."""
    messages = [
        {"type": "http.request", "body": body[start : start + at_once], "more_body": start + at_once < len(body)}
        for start in range(0, len(body), at_once)
    ]

    async def receive() -> dict:
        return messages.pop(0)

    budget = Budget(memory)
    held = RequestBody(budget, Holders(budget).of(b"a token"), 0, receive)
    scope = {"headers": [(b"content-encoding", encoding.encode())], KEY: held}
    try:
        return await read_body(scope, unpacking(scope, held.receive, packed_with(scope)), limit)
    finally:
        held.close()
        assert budget.held == 0


@pytest.mark.parametrize("name", ["gzip", "deflate without a header", "zstd"])
async def test_a_bomb_is_refused_at_the_limit_and_never_unpacked(name):
    encoding, pack = PACKED[name]
    bomb = pack(b"\0" * (64 << 20))
    tracemalloc.start()
    with pytest.raises(RefusalError, match=r"the limit is 262144; raise gateway.max_body_bytes") as caught:
        await read(encoding, bomb, 1 << 18)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (caught.value.status, peak < 4 << 20) == (413, True), peak


async def test_the_route_s_own_limit_is_looked_at_before_memory_is_asked_for_a_piece():
    packed = zstandard.compress(b"\0" * (8 << 20))
    with pytest.raises(RefusalError, match=r"the limit is 4096; raise gateway\.max_body_bytes"):
        await read("zstd", packed, 4096, memory=8_000_000)


async def test_what_a_cancelled_receive_lost_is_not_made_up_for_with_packed_bytes():
    packed = gzip.compress(b"x" * 1000)
    second = asyncio.Event()

    async def receive() -> dict:
        if second.is_set():
            await asyncio.sleep(60)
        second.set()
        return {"type": "http.request", "body": packed, "more_body": True}

    held = RequestBody(Budget(1 << 20), Holders(Budget(1 << 20)).of(b"a token"), 0, receive)
    receiving = unpacking({"headers": [], KEY: held}, receive, ["gzip"])
    assert (await receiving())["body"] == b""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receiving(), 0.01)
    assert (await receiving())["type"] == "http.disconnect"


async def test_a_frame_that_wants_much_memory_to_be_read_is_refused():
    """A window of 64 MiB, of which RFC 9659 allows 8."""
    wide = zstandard.ZstdCompressionParameters(window_log=26, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    with pytest.raises(RefusalError, match="is not zstd"):
        await read("zstd", packer.compress(b"{}") + packer.flush(), 1 << 20)


async def test_what_a_packed_body_becomes_is_counted_and_given_back(build):
    """Its values when it is unpacked, by the limit of JSON values; its bytes by the budget."""
    house = await build(limits={"json_values": 1000, "body_memory": 4_000_000})
    http = await house.http()
    many = {"messages": HI, "stop": ["a"] * 2000}
    answer = await http.post(
        "/chat/completions", content=gzip.compress(json.dumps(many).encode()), headers={"content-encoding": "gzip"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_values")
    long = {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
    answer = await http.post(
        "/chat/completions", content=gzip.compress(json.dumps(long).encode()), headers={"content-encoding": "gzip"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    entrance: Entrance = house.gateway._serving._entrance
    await asyncio.sleep(0)
    assert entrance._budget.held == 0


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", [name for name in PACKED if name != "nothing"])
async def test_a_packed_body_may_come_in_parts(name, at_once):
    encoding, pack = PACKED[name]
    body = json.dumps({"a": list(range(300))}).encode()
    assert await read(encoding, pack(body), 1 << 20, at_once=at_once) == body


async def test_a_packed_body_that_grows_beyond_the_limit_is_refused_before_it_is_unpacked():
    """Where no header says how long it is; what it would become is empty."""
    with pytest.raises(RefusalError, match=r"has 1056 bytes or more, the limit is 1000; raise gateway.max_body_bytes"):
        await read("gzip", gzip.compress(b"") * 100, 1000, at_once=96)


async def test_every_other_route_reads_them_too(build):
    """Counting, spans, feedback and what a provider answers."""
    asked: list[tuple[bytes, str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.read(), request.headers.get("content-encoding")))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/{path:.*}", answer)
    async with TestServer(app) as server:
        judge = ProviderConfig(base_url=str(server.make_url("/v1")), api_key_env="", models=("gpt-4o*",))
        house = await build(providers={"judge": judge})
        llm = await house.llm()
        http = await house.http(llm)
        raters = await house.http(
            await Sessions(house.store, house.gateway, {})("shell", 3600, project="default", many=True)
        )

        async def post(path: str, said: dict, http: httpx.AsyncClient = http) -> int:
            headers = {"content-encoding": "zstd", "content-type": "application/json"}
            return (
                await http.post(path, content=streamed_zstd(json.dumps(said).encode()), headers=headers)
            ).status_code

        span = {"traceId": trace_id_of(llm.api_key), "spanId": "00f067aa0ba902b7", "name": "work"}
        traced = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
        judged = {"model": "gpt-4o-mini", "messages": HI}
        assert await post("/messages/count_tokens", {"messages": HI}) == 200
        assert await post("/traces", traced) == 200
        assert await post("/feedback", {"response_id": "x", "reward": 1}, raters) == 404  # no such response
        assert await post("/embeddings", {"input": "x"}) == 200
        assert await post("/chat/completions", judged) == 200
    assert asked == [(b'{"input": "x"}', None), (json.dumps(judged).encode(), None)]
    assert [kept.name for kept in await spans(house.store, "rollout-0")] == ["work"]
