"""Where runs are: the stores at a place, opened when they are first asked and kept open while somebody looks.

The invariant: a store is read and never brought to another schema; one that cannot be read is named with its reason, and hides
no other. What is read is the file that is there now: one that was replaced is opened again, one that is gone is let go.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from lightning.cli.runs import databases
from lightning.errors import ConfigError, LightningError
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.store.url import parse, redacted
from lightning.types import Run

SERVER: Final = "this server"
"""What stands for the URL of a Lightning Server's own store. Folders that its runs name are not read: whoever may put a run
could name any."""
MANY: Final = 50
"""Stores from which on the usual limit of open files may not be enough."""
KEY: Final = re.compile(r"(?P<id>[^~]*)(?:~(?P<mark>[0-9a-f]{8}))?")


@dataclass(frozen=True, slots=True)
class Located:
    """A run and the store that has it. `key` names it in addresses: its id, with a mark of the store where several have it."""

    key: str
    run: Run
    store: Store
    url: str


class Places:
    """The stores at a place: a folder of runs, a run's folder, a database file, a store's or a server's URL; or `stores` that
    are open already and belong to somebody else, by the URL that is shown of them. `project` bounds what is seen of them.
    `patience` are the seconds that a page waits for what takes long to find out: it is shown without it then, as one that may
    change. None: as long as it takes."""

    def __init__(
        self,
        where: str = "",
        *,
        stores: Mapping[str, Store] | None = None,
        project: str | None = None,
        patience: float | None = None,
    ) -> None:
        self.where = where
        self.project = project
        self.patience = patience
        self.unreadable: dict[str, str] = {}
        """Why stores of the last look could not be read, by their URL without its password."""
        self._given = dict(stores or {})
        self._opened: dict[str, tuple[Store, tuple[int, int] | None]] = {}
        """By URL, with the file that was opened."""
        self._homes: dict[str, str] = {}
        """Where keys were found, to look there first."""
        self._opening = asyncio.Lock()

    async def stores(self) -> dict[str, Store]:
        """The stores that can be read now, by their URL without a password. Raises `ConfigError` for a place that is none."""
        if self._given:
            return self._given
        async with self._opening:
            found = {}
            self.unreadable = {}
            urls = await self._there()
            if len(urls) > MANY:
                from lightning.gateway.connections import allow_many_files  # it brings the gateway with it

                allow_many_files()  # each store that is open has several
            for url in urls:
                shown = redacted(url)
                try:
                    found[shown] = self._opened[url][0] if url in self._opened else await self._open(url)
                except LightningError as error:
                    self.unreadable[shown] = str(error)
        return found

    async def _there(self) -> list[str]:
        """The URLs of what is at the place now; what was opened and is there no more is closed."""
        urls: list[str] = []
        try:
            urls = databases(self.where)
        finally:
            for url, (store, file) in list(self._opened.items()):
                if url not in urls or file != _file_of(url):
                    del self._opened[url]
                    await store.close()
        return urls

    async def _open(self, url: str) -> Store:
        store, file = plugins().store(url), _file_of(url)
        await store.open(make=False)
        self._opened[url] = store, file
        return store

    async def find(self, key: str) -> Located:
        """The run of a key. Raises `ConfigError` for one that is in no store."""
        parts = KEY.fullmatch(key)
        name, mark = (unquote(parts["id"]), parts["mark"]) if parts else (key, None)
        refused: LightningError | None = None
        stores = await self.stores()
        for url in sorted(stores, key=lambda url: url != self._homes.get(key)):
            if mark and mark != mark_of(url):
                continue
            try:
                run = await stores[url].get_run(name)
            except LightningError as error:
                refused = error
                continue
            if run is not None and self.project in (None, run.project):
                self._homes[key] = url
                return Located(key, run, stores[url], url)
        if refused is not None:
            raise refused
        why = "".join(f"; {url} cannot be read: {said}" for url, said in self.unreadable.items())
        raise ConfigError(f"there is no run {name!r} in {redacted(self.where) or 'this store'}{why}")

    async def close(self) -> None:
        """Close what was opened here. Idempotent."""
        opened, self._opened = self._opened, {}
        for store, _ in opened.values():
            await store.close()


def _file_of(url: str) -> tuple[int, int] | None:
    """Which file a database is now, wherever its name has come from; None for one that is none."""
    if not url.startswith("sqlite:"):
        return None
    try:
        found = Path(parse(url).path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def mark_of(url: str) -> str:
    """What tells the run of one store from those of the same id in others."""
    return hashlib.sha256(url.encode()).hexdigest()[:8]


def key_of(run: str, url: str = "") -> str:
    """The key of a run; with a `url`, of the run in that store alone. A key has no comma: lists of them are separated by it."""
    name = run.replace("%", "%25").replace(",", "%2C").replace("~", "%7E")
    return f"{name}~{mark_of(url)}" if url else name
