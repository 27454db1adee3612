"""Connections to PostgreSQL and the transaction object that operations get.

The invariant: a session commits durably (`synchronous_commit`), sees its own schema only, and gives up what it holds when its
client falls silent.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import asyncpg
from lightning.store.rows import Row, Value

from lightning_postgres.prefix_parents import TransactionParents
from lightning_postgres.settings import Settings

CONNECT_SECONDS: Final = 10.0
_NOW: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"
_LOCKED: Final = "SELECT locked.*, extract(epoch FROM clock_timestamp())::float8 FROM ({} FOR UPDATE) AS locked"
_ALONE: Final = "SELECT pg_advisory_xact_lock($1)"
_SESSION: Final = {
    "application_name": "lightning",
    "synchronous_commit": "on",
    "client_encoding": "utf-8",
    # A client that is gone without a word must not hold its rows: its transaction ends within a minute or so.
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}


async def connect(settings: Settings, *, statement_seconds: float | None) -> asyncpg.Connection:
    """A session in the store's schema, whose statements may take so long each; as long as they need if that is None.

    Raises what asyncpg raises, see `failures`.
    """
    tls: str | ssl.SSLContext = settings.ssl
    if settings.ca:
        tls = ssl.create_default_context(cafile=settings.ca)
    return await asyncpg.connect(
        host=settings.host,
        port=settings.port,
        user=settings.user or None,
        password=settings.password or None,
        database=settings.database,
        ssl=None if settings.host.startswith("/") else tls,
        timeout=min(CONNECT_SECONDS, settings.timeout),
        command_timeout=statement_seconds,
        statement_cache_size=256,
        max_cached_statement_lifetime=0,
        server_settings={**_SESSION, "search_path": settings.schema},
    )


def channel(settings: Settings) -> str:
    """The name under which the processes of one schema tell one another of changes."""
    return f"lightning_{_hash(settings.schema)[:16]}"


def watched(run: str) -> str:
    """A run as it is named on the channel: of fixed length and without anything to quote."""
    return _hash(run)


def lock_key(settings: Settings, name: str) -> int:
    """The advisory lock of a name; the locks of a database are shared by its schemas."""
    digest = hashlib.blake2b(f"{settings.schema}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@lru_cache(maxsize=512)
def _numbered(sql: str) -> str:
    """`?` as `$1`, `$2`, ...: the texts of `lightning.store.sql` have no other question marks."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


class PostgresTransaction:
    """A `Transaction` on one connection, which belongs to it until the transaction ends."""

    def __init__(self, connection: Any, settings: Settings, parents: TransactionParents | None = None) -> None:
        self._connection = connection
        self._settings = settings
        self._parents = parents
        self._now: float | None = None
        self._changed: set[str] = set()

    @property
    def parents(self) -> TransactionParents:
        """See `Transaction.parents`."""
        assert self._parents is not None, "a reading transaction does not append"
        return self._parents

    @property
    def commit(self) -> str:
        """The statements that end the transaction and tell the watches of it, at once."""
        name = channel(self._settings)
        told = "".join(f"NOTIFY {name}, '{watched(run)}'; " for run in sorted(self._changed))
        return f"{told}COMMIT"

    async def now(self) -> float:
        """See `Transaction.now`."""
        if self._now is None:
            self._now = float(await self._connection.fetchval(_NOW))
        return self._now

    async def one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """See `Transaction.one`."""
        row: Row | None = await self._connection.fetchrow(_numbered(sql), *values)
        return row

    async def all(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction.all`."""
        rows: list[Row] = await self._connection.fetch(_numbered(sql), *values)
        return rows

    async def locked(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction.locked`. Brings the time with it, which most of those who lock a row ask for next."""
        found = await self._connection.fetch(_numbered(_LOCKED.format(sql)), *values)
        if found and self._now is None:
            self._now = found[0][-1]
        return [row[:-1] for row in found]

    async def free(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction.free`."""
        return await self.all(f"{sql} FOR UPDATE SKIP LOCKED", values)

    async def kept(self, sql: str, values: Sequence[Value] = ()) -> bool:
        """See `Transaction.kept`."""
        return await self.one(f"{sql} FOR KEY SHARE", values) is not None

    async def alone(self, *names: str) -> None:
        """See `Transaction.alone`."""
        for name in names:
            await self._connection.execute(_ALONE, lock_key(self._settings, name))

    async def run(self, sql: str, values: Sequence[Value] = ()) -> int:
        """See `Transaction.run`."""
        status: str = await self._connection.execute(_numbered(sql), *values)
        return int(status.rpartition(" ")[2])

    async def many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """See `Transaction.many`."""
        if len(rows) == 1:
            await self._connection.execute(_numbered(sql), *rows[0])
        elif rows:
            await self._connection.executemany(_numbered(sql), rows)

    async def insert(self, sql: str, values: Sequence[Value]) -> int | None:
        """See `Transaction.insert`."""
        number: int | None = await self._connection.fetchval(f"{_numbered(sql)} RETURNING n", *values)
        return number

    async def insert_new(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """See `Transaction.insert_new`."""
        return len(await self._connection.fetchmany(f"{_numbered(sql)} RETURNING n", rows)) if rows else 0

    async def changed(self, run: str) -> None:
        """See `Transaction.changed`."""
        self._changed.add(run)
