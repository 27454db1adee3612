"""Bodies that come packed, at the routes that plugins answer and with keys of many conversations."""

from __future__ import annotations

import json

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer
from lightning.config.sections import ProviderConfig
from lightning.instrument.context import trace_id_of
from lightning_otel.traces.store import spans
from lightning_server.serving import Sessions

from tests.core.gateway.conftest import build  # noqa: F401 — a fixture
from tests.core.gateway.test_request_body import HI, streamed_zstd


async def test_every_other_route_reads_them_too(build):  # noqa: F811 — the fixture
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
