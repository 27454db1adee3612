"""Opening: a run's agents are answered by its policy alone at any server; and the port that clients know."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession
from lightning.config import Config
from lightning.errors import GatewayError, PolicyServerError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.identity import gateway_secret
from lightning.gateway.upstream import Found, Pool, Slot
from lightning_server.fleet.owner import Owner

from tests.core.trainer.test_opening import House, ask


async def test_a_taken_port_is_said_before_anything_is_started(house: House, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(GatewayError, match=r"in use.*server\.port"):
            await house.open(tmp_path, restores=False, **{"server.port": other.getsockname()[1]})
        assert house.policy.notice is None, "nothing was started"


@pytest.fixture
async def server(house: House) -> AsyncIterator[Gateway]:
    """A server that has only the store, which a trainer that was killed had told of its policy."""
    await Owner(house.store, "run").open([Upstream(house.fake.url, house.fake.model)], 7)
    gateway = Gateway(house.store, [], Config().gateway, secret=await gateway_secret(house.store), shared=True)
    await gateway.start()
    yield gateway
    await gateway.close()


async def test_calls_wait_at_every_server_until_the_run_is_restored(
    house: House, server: Gateway, tmp_path: Path
) -> None:
    lease = await house.lease()
    assert await ask(server.llm(lease)) == 200
    stack = await house.open(tmp_path, restores=True)
    assert house.policy.notice["servers"] == [], "taken over before anything new can answer at a known address"
    asking = [asyncio.create_task(ask(gateway.llm(lease))) for gateway in (server, stack.gateway)]
    with pytest.raises(PolicyServerError, match="does not fit"):
        await stack._update(Path("bad"), 7, None)
    house.policy.died.set()  # and is restarted, with the weights that are not the run's
    await house.policy.restarted.wait()
    await stack._serving.wait()
    await asyncio.sleep(0.2)
    assert not any(one.done() for one in asking)
    assert await house.versions() == [7]
    await stack.update(Path("good"), 8)
    assert await asyncio.gather(*asking) == [200, 200]
    assert await house.versions() == [7, 8, 8]


async def test_a_run_without_steps_is_served_at_once(house: House, server: Gateway, tmp_path: Path) -> None:
    lease = await house.lease()
    stack = await house.open(tmp_path, restores=False)
    async with asyncio.timeout(25):
        assert [await ask(gateway.llm(lease)) for gateway in (server, stack.gateway)] == [200, 200]
    assert await house.versions() == [0, 0]


async def test_a_server_that_is_started_again_is_taken_for_no_other_ones(
    house: House, server: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers at its address, under its new name, long before it has the run's weights and is named."""
    lease, fake = await house.lease(), house.fake
    stack = await house.open(tmp_path, restores=False)
    both = (server, stack.gateway)
    assert [await ask(gateway.llm(lease)) for gateway in both] == [200, 200]
    pools, looked = [gateway._policies.of("run").pool for gateway in both], [0, 0]

    async def restart(weights: Path | None, version: int) -> None:
        async with asyncio.timeout(20):
            while not all(gateway._policies.of("run").gate.closed for gateway in both):
                await asyncio.sleep(0.005)
            fake.model = house.policy.alias = "started-again"
            await fake.start()
            for number, pool in enumerate(pools):
                _count(pool, looked, number)
                pool.check_every = 0.01
                pool._assigned.set()
            while min(looked) < 3:
                await asyncio.sleep(0.005)
        assert [pool.healthy for pool in pools] == [0, 0]
        house.policy.died.clear()

    house.policy.restart = restart  # type: ignore[method-assign]
    await fake.close()
    house.policy.died.set()
    assert await asyncio.gather(*(ask(gateway.llm(lease)) for gateway in both)) == [200, 200]
    assert "another server answers" not in caplog.text


def _count(pool: Pool, looked: list[int], number: int) -> None:
    check = pool.check

    async def counted(slot: Slot, session: ClientSession) -> Found:
        looked[number] += 1
        return await check(slot, session)

    pool.check = counted  # type: ignore[method-assign]
