"""`MemoryStore`: a store for tests and notebooks that keeps nothing.

It is the SQLite store on a private in-memory database, so that it cannot behave differently: the rules are written once.
"""

from __future__ import annotations

from lightning.errors import ConfigError
from lightning.store.sqlite.connection import MEMORY
from lightning.store.sqlite.store import SqliteStore
from lightning.store.url import StoreURL, parse


class MemoryStore(SqliteStore):
    """Empty at every `open`, gone with `close`, seen only through this object."""

    def __init__(self) -> None:
        super().__init__(MEMORY)

    @classmethod
    def from_url(cls, url: str | StoreURL = "memory://") -> MemoryStore:
        """`memory://`, which takes no path and no options."""
        where = parse(url) if isinstance(url, str) else url
        where.check_options(())
        if where.host or where.path:
            raise ConfigError(f"{url!r}: a memory store has no name and cannot be shared, write memory://")
        return cls()
