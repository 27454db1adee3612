"""Bytes that arrive after their connection was given up, and a server that hangs without dropping its connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from lightning.errors import UnavailableError
from lightning.types import Rollout, Run, Status, Task
from lightning_redis import connection, pipeline
from lightning_redis.store import RedisStore
from lightning_resources.nouns import Resource
from lightning_resources.operations import alias_history, put_resource, roll_back_alias, set_alias

from tests.servers.redis import RedisServer


class HoldingProxy:
    """Forwards to a port. The next piece that contains `hold` is kept, and the client's connection cut; `deliver` sends it
    on over the connection that it was meant for."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.hold = b""
        self._held: list[tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._above: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        for above in self._above:
            above.close()

    async def deliver(self) -> bytes:
        """Return the beginning of what it is answered, when that is there."""
        ((piece, reader, above),) = self._held
        self._held.clear()
        above.write(piece)
        return await asyncio.wait_for(reader.read(1 << 16), 10)

    async def _serve(self, below: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader, above = await asyncio.open_connection("127.0.0.1", self._target)
        self._above.append(above)
        back = asyncio.create_task(self._answer(reader, writer))
        with contextlib.suppress(OSError):
            while piece := await below.read(1 << 20):
                if self.hold and self.hold in piece:
                    self.hold = b""
                    back.cancel()
                    await asyncio.wait([back])
                    self._held.append((piece, reader, above))
                    break
                above.write(piece)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 20):
                writer.write(piece)


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[HoldingProxy]:
    made = HoldingProxy(redis_server.port)
    yield made
    await made.stop()


@pytest.fixture
async def store(proxy: HoldingProxy, request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
    """Over the proxy, with the run `run`."""
    name = request.node.name.replace("test_", "").replace("_", "-")[:60]
    made = RedisStore.from_url(f"redis://127.0.0.1:{await proxy.start()}?prefix={name}")
    await made.open()
    await made.put_run(Run("run", "run"))
    yield made
    await made.close()


async def test_a_value_that_arrives_late_does_not_come_back(store: RedisStore, proxy: HoldingProxy) -> None:
    await store.put_state("run", "k", "warm")
    proxy.hold = b"OLD"
    await store.put_state("run", "k", "OLD")
    await store.put_state("run", "k", "new")
    assert b"late" in await proxy.deliver()
    assert await store.get_state("run", "k") == "new"


async def test_what_arrives_after_close_does_nothing(store: RedisStore, proxy: HoldingProxy) -> None:
    await store.put_state("run", "k", "warm")
    proxy.hold = b"OLD"
    await store.put_state("run", "k", "OLD")
    await store.put_state("run", "k", "new")
    await store.close()
    assert b"late" in await proxy.deliver()
    await store.open()
    assert await store.get_state("run", "k") == "new"


async def test_a_lease_that_arrives_late_takes_nothing(store: RedisStore, proxy: HoldingProxy) -> None:
    """Neither what was given already, nor what came after it had been answered that there is nothing."""
    await store.lease("nobody", "w")
    proxy.hold = b"early-worker"
    assert await store.lease("run", "early-worker") == []
    await store.create_rollouts([Rollout(f"r{i}", "run", Task("q"), "g", index=i) for i in range(3)])
    assert b"late" in await proxy.deliver()
    proxy.hold = b"late-worker"
    (held,) = await store.lease("run", "late-worker")
    await store.put_state("run", "k", 1)
    assert b"late" in await proxy.deliver()
    running = (await store.list_rollouts("run", status=Status.RUNNING)).items
    assert [rollout.id for rollout in running] == [held.rollout.id]


async def test_an_alias_is_rolled_back_once(store: RedisStore, proxy: HoldingProxy) -> None:
    for version in (1, 2, 3):
        await put_resource(store, Resource("p", f"text {version}"))
        await set_alias(store, "p", "production", version)
    await roll_back_alias(store, "p", "production")
    proxy.hold = b":moves:"
    await roll_back_alias(store, "p", "production")
    await store.put_state("run", "k", 1)
    assert b"late" in await proxy.deliver()
    assert [move.version for move in await alias_history(store, "p", "production")] == [1, 2, 3, 2, 1]


# a server that hangs --------------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let timeouts below a second be what they say."""
    for module in (connection, pipeline):
        monkeypatch.setattr(module, "LEAST_SECONDS", 0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP is POSIX")
@pytest.mark.usefixtures("brief")
async def test_a_server_that_hangs_is_waited_for_as_long_as_the_url_says(tmp_path: Path) -> None:
    """Also by what waits behind a batch that hangs."""
    with RedisServer(tmp_path) as server:
        store = RedisStore.from_url(server.url("timeout=0.7"))
        await store.open()
        await store.put_state("run", "k", 0)

        async def seconds(operation: Callable[[], object]) -> float:
            begun = time.monotonic()
            with pytest.raises(UnavailableError, match="does not answer"):
                await operation()  # type: ignore[misc]
            return time.monotonic() - begun

        os.kill(server.pid, signal.SIGSTOP)
        try:
            first = asyncio.create_task(seconds(lambda: store.put_state("run", "k", 1)))
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(seconds(lambda: store.put_state("run", "k", 2)))
            found = await asyncio.wait_for(asyncio.gather(first, behind), 20)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert max(found) < 0.7 + 0.5, found
        await store.put_state("run", "k", 3)
        assert await store.get_state("run", "k") == 3
        await store.close()


@pytest.mark.usefixtures("brief")
async def test_a_short_timeout_does_not_cut_off_who_listens(redis_server: RedisServer) -> None:
    """Redis lets a listener wait for longer than that."""
    store = RedisStore.from_url(redis_server.url("prefix=listening&timeout=0.1"))
    await store.open()
    async with store.watch("run") as watch:
        listener = next(iter((store._link_here()).listeners._by_stream.values()))
        await watch.wait(0.05)
        before = listener._wire._connection
        await watch.wait(0.3)
        assert before is not None
        assert listener._wire._connection is before
    await store.close()
