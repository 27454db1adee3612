"""The databases of a campaign, which die and come back like everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.servers.postgres import FAST, PostgresServer
from tests.servers.redis import RedisServer


class Database(Protocol):
    """A database whose files are in one folder."""

    @property
    def url(self) -> str:
        """The store's URL, the same after every start."""

    @property
    def is_process(self) -> bool:
        """Whether there is something to kill."""

    def start(self) -> None:
        """Start it, unless it runs, and return when it answers."""

    def kill(self) -> None:
        """`kill -9`."""

    def close(self) -> None:
        """Stop it; its files stay."""


class File:
    """SQLite: a library in the other processes, which are killed anyway."""

    is_process = False

    def __init__(self, folder: Path) -> None:
        self._file = folder / "lightning.db"

    @property
    def url(self) -> str:
        """See `Database.url`."""
        return f"sqlite:///{self._file}"

    def start(self) -> None:
        """Nothing to start."""

    def kill(self) -> None:
        """Nothing to kill."""

    def close(self) -> None:
        """Nothing to stop."""


class Redis:
    """Redis, every command of which is in its append-only file, and on the disk, before it is answered."""

    is_process = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._server = RedisServer(folder)
        self._runs = False

    @property
    def url(self) -> str:
        """See `Database.url`."""
        return self._server.url()

    def start(self) -> None:
        """See `Database.start`."""
        if not self._runs:
            self._server.start()
            self._runs = True

    def kill(self) -> None:
        """See `Database.kill`."""
        self._server.kill()
        self._runs = False

    close = kill


DATABASES: dict[str, Callable[[Path], Database]] = {
    "sqlite": File,
    # Processes die here, not machines: without fsync nothing else is tested, and a slow disk delays nobody's return.
    "postgres": lambda folder: PostgresServer(folder / "postgres", settings=FAST),
    "redis": lambda folder: Redis(folder / "redis"),
}
