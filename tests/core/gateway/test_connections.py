"""The socket that a gateway is served on."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from lightning.config import LimitsConfig
from lightning.gateway import connections as serving
from lightning.gateway.connections import Serving, bind
from starlette.types import Receive, Scope, Send


async def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        writer.close()

    listener = bind("127.0.0.1", 0)
    server = await asyncio.start_server(serve, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 120)
        writer.close()


async def test_a_stop_closes_what_is_at_rest_and_cuts_off_what_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "DRAIN", 0.05)
    hangs, cut_off = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] == "/hangs":
                hangs.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.set()
            raise
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    port = Serving(app, bind("127.0.0.1", 0), LimitsConfig())
    await port.start()
    async with aiohttp.ClientSession() as http, aiohttp.ClientSession() as other:
        async with http.get(port.url) as answer:
            assert answer.status == 200
        asking = asyncio.create_task(other.get(f"{port.url}/hangs"))
        await hangs.wait()
        await port.stop()
        await asyncio.wait_for(cut_off.wait(), 5)
        assert "1 call had not ended after" in caplog.text
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(port.url)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_stop_does_not_wait_for_connections_at_rest(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    port = Serving(app, bind("127.0.0.1", 0), LimitsConfig())
    await port.start()
    async with aiohttp.ClientSession() as http:
        async with http.get(port.url) as answer:
            assert answer.status == 200
        await asyncio.wait_for(port.stop(), serving.DRAIN / 2)
    assert "had not ended" not in caplog.text
