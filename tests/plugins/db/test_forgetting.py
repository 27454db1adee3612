"""A run that was forgotten, looked for in all that its database holds."""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lightning.plugins import plugins
from lightning.store.protocol import TRACES_RUN, Store
from lightning.store.url import sqlite_url
from lightning.types import Rollout, Task
from lightning_db.keeper import keeper_of
from lightning_server.fleet.records import alive_key, notice_key, seat_key

from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

RUN = "forgotten-7f3a"
"""Every name and every value of the run has it."""
COMMANDS = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"list": ("LRANGE", "0", "-1"),
    b"zset": ("ZRANGE", "0", "-1"),
    b"stream": ("XRANGE", "-", "+"),
}
Traces = Callable[[], Iterator[object]]
"""Every row, key and value in which the run is named."""


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow), "redis"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Traces]:
    """The URL of an empty store, and what looks through it."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "store.db"), lambda: _in_sqlite(tmp_path / "store.db")
    if request.param == "postgres":
        url, postgres = request.getfixturevalue("postgres_url")(), request.getfixturevalue("postgres_server")
        return url, lambda: _in_postgres(postgres, url.partition("schema=")[2].partition("&")[0])
    prefix, redis = f"forgetting-{uuid.uuid4().hex[:12]}", request.getfixturevalue("redis_server")
    return redis.url(f"prefix={prefix}"), lambda: _in_redis(redis, prefix)


def _in_sqlite(path: Path) -> Iterator[object]:
    with closing(sqlite3.connect(path)) as file:
        for (table,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in file.execute(f"SELECT * FROM {table}"):
                if RUN in str(row):
                    yield table, row


def _in_postgres(server: PostgresServer, schema: str) -> Iterator[object]:
    tables = server.sql(f"SELECT string_agg(tablename, ' ') FROM pg_tables WHERE schemaname = '{schema}'")
    for table in tables.split():
        found = server.sql(f"SELECT count(*) FROM {schema}.{table} t WHERE t::text LIKE '%{RUN}%'")
        if found != "0":
            yield table, found


def _in_redis(server: RedisServer, prefix: str) -> Iterator[object]:
    """What has a time to live is an answer that may be asked for again, and goes by itself."""
    for line in server.command("KEYS", f"{prefix}:*").split(b"\r\n"):
        if not line.startswith(prefix.encode()):
            continue
        key = line.decode()
        kind = server.command("TYPE", key).strip().removeprefix(b"+")
        name, *rest = COMMANDS[kind]
        lives = server.command("TTL", key).strip()
        if lives == b":-1" and RUN.encode() in line + server.command(name, key, *rest):
            yield key


async def fill_more(store: Store) -> None:
    """What `filled` leaves out: resources in use, calls that were named, and what servers keep of the run."""
    await store.create_rollouts(
        [Rollout(f"{RUN}/more/{n}", RUN, Task("q"), f"{RUN}/more", resources={"writer": 1}) for n in range(3)]
    )
    leases = await store.lease(RUN, f"{RUN}-worker", limit=2, ttl=3600, once="1")
    assert len(leases) == 2
    await store.put_state(RUN, "note", RUN, once="2")
    await store.log_metrics(RUN, 0, {RUN: 1.0}, once="3")
    await store.release(f"{RUN}-worker", once="4")
    for key in (notice_key(RUN), alive_key(RUN), seat_key(RUN, 0), seat_key(RUN, 1)):
        await store.put_state("", key, {"id": RUN})
    for number in range(2):
        await store.put_state(TRACES_RUN, f"trace-{number}", [f"{RUN}/more/{number}", 1, time.time() + 3600])


def test_nothing_is_left_of_a_run_that_was_forgotten(database: tuple[str, Traces], filled: Callable[..., Any]) -> None:
    url, traces = database

    async def live_and_be_forgotten() -> None:
        store = plugins().store(url)
        await store.open()
        await filled(store, RUN)
        await fill_more(store)
        await store.close()
        assert len(list(traces())) > 6, "it is found while it is there"
        await keeper_of(url).forget_run(RUN)

    asyncio.run(live_and_be_forgotten())
    assert list(traces()) == []
