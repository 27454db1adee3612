"""The store for many machines: a PostgreSQL database that any number of processes share.

What was awaited is committed with `synchronous_commit = on`: it survives the death of every process, of the database server's
too.
"""

from lightning.errors import MissingExtraError

try:
    import asyncpg  # noqa: F401 — only whether it is there
except ImportError as error:
    raise MissingExtraError("postgres", "asyncpg") from error

from lightning.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
