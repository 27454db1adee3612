"""Find the stores at a place, and the runs, groups and rollouts in them that an address names.

The invariant: a store is only read and never migrated to another schema. A store that cannot be read is named with its reason
and hides no other. A database that was replaced is opened again, and one that is gone is closed. A rollout of another run is
never returned, whatever its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote

from lightning.asyncio_utils import allow_many_files
from lightning.cli.output import databases
from lightning.errors import ConfigError, DataError, LightningError
from lightning.plugins import plugins
from lightning.store.pages import each_rollout
from lightning.store.places import DATABASE, run_id_of
from lightning.store.protocol import Store
from lightning.store.url import parse, redacted
from lightning.trainer.context import is_over
from lightning.types import Rollout, Run, StepRecord

T = TypeVar("T")
SERVER: Final = "this server"
"""Stands for the URL of a Lightning Server's own store. The console reads no folders that runs of this store name, because
whoever may add a run could name any folder."""
WAITS: Final = 2.0
"""Seconds that a page waits for its slow parts; then it is shown without them, and adds them when they are there."""
MANY: Final = 50
"""With more stores than this, the usual limit of open files may be too low and is raised."""
KEY: Final = re.compile(r"(?P<id>[^~]*)(?:~(?P<mark>[0-9a-f]{8}))?")


@dataclass(frozen=True, slots=True)
class Located:
    """A run and its store, whose URL is `url`. `key` names the run in addresses: its id, followed by a mark of the store if
    several stores have a run of that id."""

    key: str
    run: Run
    store: Store
    url: str


class Places:
    """The stores at the place `where`: a folder of runs, a run's folder, a database file, or the URL of a store or a server.
    Instead, `stores` may give open stores of another owner, by the URL to show. Only runs of `project` are seen (None: all).
    A page waits `patience` seconds for its slow parts (None: as long as they take); then it is shown without them, as a page
    that may change."""

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
        """Why some stores could not be opened when `stores` was last called, by their URL without its password."""
        self._given = dict(stores or {})
        self._opened: dict[str, tuple[Store, tuple[int, int] | None]] = {}
        """The open stores by URL, each with the identity of its file (`_file_of`) when it was opened."""
        self._homes: dict[str, str] = {}
        """The URL of the store in which each key was last found; `find` asks that store first."""
        self._opening = asyncio.Lock()

    async def stores(self) -> dict[str, Store]:
        """Return the stores that can be opened now, by their URL without a password. Raises `ConfigError` if there is no such
        place."""
        if self._given:
            return self._given
        async with self._opening:
            found = {}
            self.unreadable = {}
            urls = await self._there()
            if len(urls) > MANY:
                allow_many_files()  # each store that is open has several
            for url in urls:
                shown = redacted(url)
                try:
                    found[shown] = self._opened[url][0] if url in self._opened else await self._open(url)
                except LightningError as error:
                    self.unreadable[shown] = str(error)
        return found

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> tuple[dict[str, T], dict[str, str]]:
        """Ask each store, and return the answers by URL, and the reasons of those that cannot be read. Raises `ConfigError` if
        there is no such place."""
        answers, unreadable = {}, {}
        for url, store in (await self.stores()).items():
            try:
                answers[url] = await question(store)
            except LightningError as error:
                unreadable[url] = str(error)
        return answers, {**self.unreadable, **unreadable}

    async def _there(self) -> list[str]:
        """Return the URLs of the databases at the place now, and close the open stores that are gone or were replaced."""
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
        """Find the run that a key names. Raises `ConfigError` if no store has it, or the error of a store that failed."""
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
        """Close the stores that this object opened. Idempotent."""
        opened, self._opened = self._opened, {}
        for store, _ in opened.values():
            await store.close()


def _file_of(url: str) -> tuple[int, int] | None:
    """Return device and inode of an SQLite database's file; None for a store of another kind, or if there is no file."""
    if not url.startswith("sqlite:"):
        return None
    try:
        found = Path(parse(url).path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def mark_of(url: str) -> str:
    """Return the mark of a store (8 hex digits of its URL's hash), which tells its runs from those of other stores."""
    return hashlib.sha256(url.encode()).hexdigest()[:8]


def key_of(run: str, url: str = "") -> str:
    """Return the key of a run, with the mark of its store if a `url` is given. A key has no comma, which separates keys."""
    name = run.replace("%", "%25").replace(",", "%2C").replace("~", "%7E")
    return f"{name}~{mark_of(url)}" if url else name


def folder_of(found: Located) -> str:
    """Return the run's folder as commands take it, relative to the current one if below it; empty if the run's store is not in
    its own folder on this machine."""
    if not found.url.startswith("sqlite:"):
        return ""
    path = Path(parse(found.url).path)
    try:
        own = path.name == DATABASE and run_id_of(path.parent) == found.run.id
    except LightningError:
        return ""
    if not own:
        return ""
    here = Path.cwd()
    return str(path.parent.relative_to(here) if path.parent.is_relative_to(here) else path.parent)


LOOKED: Final = 20_000
"""Most rollouts that are searched for a group whose name is not the trainer's form."""


async def rollout_of(located: Located, rollout: str) -> Rollout:
    """Return the rollout with this id. Raises `DataError` if the run has none."""
    found = await located.store.get_rollout(rollout)
    if found is None or found.run != located.run.id:
        raise DataError(f"the run {located.run.id} has no rollout {rollout[:200]!r}")
    return found


async def group_of(located: Located, group: str, member: Rollout | None = None) -> list[Rollout]:
    """Return the rollouts of a group, by their index. A known `member` of it saves the search for one. Raises `DataError` if
    the run has no such group."""
    store, run = located.store, located.run.id
    first = member or await _first_of(store, run, group)
    same = each_rollout(store, run, split=first.split, step=first.step)
    return sorted([each async for each in same if each.group == group], key=lambda each: each.index)


async def _first_of(store: Store, run: str, group: str) -> Rollout:
    """Find one rollout of a group: by the ids that the trainer gives, else among the first `LOOKED` rollouts of the run. Raises
    `DataError` if there is none."""
    for name in (f"{group}/0", group):
        found = await store.get_rollout(name)
        if found is not None and found.run == run and found.group == group:
            return found
    looked = 0
    async for each in each_rollout(store, run):
        looked += 1
        if each.group == group:
            return each
        if looked >= LOOKED:
            raise DataError(
                f"the group {group[:200]!r} is not among the first {LOOKED} rollouts of the run {run}: open it from the page "
                "of one of its rollouts"
            )
    raise DataError(f"the run {run} has no group {group[:200]!r}")


async def neighbours(
    located: Located, rollout: Rollout, record: StepRecord | None
) -> tuple[list[str], tuple[Rollout, ...]]:
    """Return the ids of all groups of a rollout's step, in the order of the step `record` if it has the rollout's group, else
    as they were planned; and the rollouts that were read to find them (none in the first case)."""
    if record is not None and rollout.group in record.groups:
        return list(record.groups), ()
    page = await located.store.list_rollouts(located.run.id, split=rollout.split, step=rollout.step)
    return list(dict.fromkeys(each.group for each in page.items)), page.items


async def may_change(store: Store, rollouts: list[Rollout]) -> bool:
    """Return whether the rollouts of a group, or their results in training, may still change."""
    if all(each.status.ended for each in rollouts) and (
        rollouts[0].split != "train" or any(each.trained_at_step is not None for each in rollouts)
    ):
        return False
    return not await is_over(store, rollouts[0].run)
