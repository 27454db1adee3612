"""What the redis store asks of a server that has just answered."""

from __future__ import annotations

import pytest
from lightning.errors import StoreError
from lightning.store.redis.opening import check_server
from lightning.store.redis.settings import Settings
from lightning.store.redis.wire import Reply, away
from redis.exceptions import BusyLoadingError


def info(**changes: object) -> bytes:
    values = {"redis_version": "7.2.4", "aof_enabled": 0, "loading": 0, **changes}
    return "".join(f"{name}:{value}\r\n" for name, value in values.items()).encode()


async def test_a_server_that_still_loads_is_waited_for_and_one_without_a_file_is_refused() -> None:
    async def loading(*command: bytes) -> Reply:
        return info(loading=1)

    async def without(*command: bytes) -> Reply:
        return info()

    with pytest.raises(BusyLoadingError) as waited:
        await check_server(loading, Settings())
    assert away(waited.value)
    with pytest.raises(StoreError, match="keeps no append-only file"):
        await check_server(without, Settings())
