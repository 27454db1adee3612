"""What the redis store asks of a server that has just answered."""

from __future__ import annotations

import pytest
from lightning.errors import SchemaError, StoreError, UnavailableError
from lightning_redis.connection import Reply, away, translate
from lightning_redis.handshake import check_server
from lightning_redis.settings import Settings
from redis.exceptions import BusyLoadingError, NoPermissionError, RedisError, ResponseError


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


async def test_a_replica_counts_as_away_and_its_master_is_asked_for() -> None:
    async def replica(*command: bytes) -> Reply:
        return info(role="slave")

    with pytest.raises(RedisError) as waited:
        await check_server(replica, Settings(durability="none"))
    assert away(waited.value)
    told = translate(waited.value, Settings())
    assert isinstance(told, UnavailableError)
    assert "name its master in the URL" in str(told)


def test_too_few_replicas_are_waited_for() -> None:
    assert away(ResponseError("NOREPLICAS Not enough good replicas to write."))


@pytest.mark.parametrize(
    "error",
    [
        NoPermissionError("this user has no permissions to run the 'hset' command"),
        ResponseError(
            "ACL failure in script: User u has no permissions to run the 'hset' command script: x, on @user_script:5."
        ),
        ResponseError(
            "Error running script: @user_script: 5: The user executing the script can't run this command or subcommand"
        ),
    ],
)
def test_missing_rights_are_no_damage(error: RedisError) -> None:
    told = translate(error, Settings())
    assert not isinstance(told, SchemaError)
    assert "grant it" in str(told)
