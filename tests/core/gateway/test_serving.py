"""The socket that a gateway is served on."""

from __future__ import annotations

import asyncio
import socket

from lightning.gateway.serving import bind


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
        assert await asyncio.wait_for(accepted, 5)
        writer.close()
