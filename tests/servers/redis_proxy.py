"""A wire to Redis that breaks: what was asked is done, and the answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from typing import Self


class LossyProxy:
    """Forwards to a port; `chance` is how probably the answer of scripts is lost, and the connection with it.

    With a `context` it speaks TLS to the client.
    """

    def __init__(self, target: int, chance: float = 0.0, seed: int = 0, context: ssl.SSLContext | None = None) -> None:
        self.target, self.chance, self._context = target, chance, context
        self.lost = 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context))
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, task: object) -> object:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(10)  # type: ignore[arg-type]

    async def _stop(self) -> None:
        self._server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            above, below = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        asked = bytearray()
        there = asyncio.create_task(self._ask(reader, below, asked))
        back = asyncio.create_task(self._answer(above, writer, asked))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        for task in (there, back):
            task.cancel()
        for end in (below, writer):
            end.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytearray) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while piece := await reader.read(1 << 16):
                asked += piece
                writer.write(piece)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytearray) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while piece := await reader.read(1 << 16):
                if b"EVALSHA" in asked and self._random.random() < self.chance:
                    self.lost += 1
                    return
                asked.clear()
                writer.write(piece)
                await writer.drain()
