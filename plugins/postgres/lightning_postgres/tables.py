"""The tables of the PostgreSQL store: those of `lightning.store.schema` in PostgreSQL's types.

The invariant: the tables are made in one transaction and under one lock. Tables of another version, or of another program, are
refused and not touched.
"""

from __future__ import annotations

from typing import Any, Final

from lightning.errors import SchemaError, StoreError
from lightning.store import schema

from lightning_postgres.connection import connected, in_postgres, lock_key
from lightning_postgres.connections import Patience
from lightning_postgres.settings import Settings

_STORAGE: Final = (
    "ALTER TABLE rollouts SET (fillfactor = 80)",
    # Tokens are compressed already: EXTERNAL keeps the server from compressing them, and the target keeps a call in one piece
    # if it fits on a page.
    "ALTER TABLE transitions SET (toast_tuple_target = 8160)",
    "ALTER TABLE transitions ALTER COLUMN tokens SET STORAGE EXTERNAL",
)


STATEMENTS: Final = (*(in_postgres(each) for each in schema.STATEMENTS if each != schema.REVISIONS), *_STORAGE)

_TABLES: Final = "SELECT tablename FROM pg_tables WHERE schemaname = $1 ORDER BY tablename"


async def make_tables(settings: Settings, make: bool) -> None:
    """Make the tables if there are none. Raises `SchemaError` for tables of another version or program, and without `make` if
    there are none; `StoreError` if the server refuses or cannot be reached for `settings.timeout` seconds.
    """
    patience = Patience(settings)
    patience.anew = True
    while True:
        try:
            return await _make_tables(settings, make)
        except Exception as error:  # noqa: BLE001 — `patience` raises what cannot be helped
            await patience.wait(error)


async def _make_tables(settings: Settings, make: bool) -> None:
    async with connected(settings, settings.timeout) as connection:
        if await _are_made(connection, settings):
            return
    if not make:
        raise SchemaError(f"{settings.place} holds no store: check ?schema= in the URL")
    async with connected(settings, None) as connection:  # another process may take its time
        await connection.execute("BEGIN")
        await connection.execute("SELECT pg_advisory_xact_lock($1)", lock_key(settings, "tables"))
        if not await _are_made(connection, settings):
            if not await connection.fetchval("SELECT 1 FROM pg_namespace WHERE nspname = $1", settings.schema):
                await connection.execute(f"CREATE SCHEMA {settings.schema}")
            for statement in STATEMENTS:
                await connection.execute(statement)
        await connection.execute("COMMIT")


async def _are_made(connection: Any, settings: Settings) -> bool:
    encoding = await connection.fetchval("SHOW server_encoding")
    if encoding != "UTF8":
        raise StoreError(
            f"store {settings.place}: the encoding of this database is {encoding}, which cannot hold every text: "
            "create one with createdb --encoding=UTF8 --template=template0"
        )
    tables = [row[0] for row in await connection.fetch(_TABLES, settings.schema)]
    if "schema_version" not in tables:
        if tables:
            raise SchemaError(
                f"store {settings.place}: this schema belongs to another program (tables {', '.join(tables[:5])}): "
                "name another one with ?schema="
            )
        return False
    schema.check_version(f"store {settings.place}", await connection.fetch(schema.VERSION))
    return True
