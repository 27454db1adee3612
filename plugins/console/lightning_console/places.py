"""Where runs are: the stores at a place, opened when they are first asked and kept open while somebody looks; and the rollouts
of a run that an address means.

The invariant: a store is read and never brought to another schema; one that cannot be read is named with its reason, and hides
no other. What is read is the file that is there now: one that was replaced is opened again, one that is gone is let go. What
belongs to another run is not there, whatever its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote

from lightning.asyncio_utils import allow_many_files
from lightning.cli.runs import databases
from lightning.errors import ConfigError, DataError, LightningError
from lightning.plugins import plugins
from lightning.store.pages import each_rollout
from lightning.store.places import DATABASE, run_id_of
from lightning.store.protocol import PRUNED, Store
from lightning.store.url import parse, redacted
from lightning.trainer.epochs import is_over
from lightning.types import Rollout, Run, StepRecord

T = TypeVar("T")
SERVER: Final = "this server"
"""What stands for the URL of a Lightning Server's own store. Folders that its runs name are not read: whoever may put a run
could name any."""
WAITS: Final = 2.0
"""Seconds that a page of a console waits for what takes long; it is shown without it then, and completes itself."""
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
                allow_many_files()  # each store that is open has several
            for url in urls:
                shown = redacted(url)
                try:
                    found[shown] = self._opened[url][0] if url in self._opened else await self._open(url)
                except LightningError as error:
                    self.unreadable[shown] = str(error)
        return found

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> tuple[dict[str, T], dict[str, str]]:
        """What the stores answer, by their URLs, and why some cannot be read. Raises `ConfigError` as `stores` does."""
        answers, unreadable = {}, {}
        for url, store in (await self.stores()).items():
            try:
                answers[url] = await question(store)
            except LightningError as error:
                unreadable[url] = str(error)
        return answers, {**self.unreadable, **unreadable}

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


def folder_of(found: Located) -> str:
    """The run's folder, as commands take it; empty where the run is not kept in one of this machine."""
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
"""Rollouts among which a group of an unusual name is looked for."""


async def rollout_of(located: Located, rollout: str) -> Rollout:
    """A rollout of a run. Raises `DataError` where the run has none of that id."""
    found = await located.store.get_rollout(rollout)
    if found is None or found.run != located.run.id:
        raise DataError(f"the run {located.run.id} has no rollout {rollout[:200]!r}")
    return found


async def group_of(located: Located, group: str, member: Rollout | None = None) -> list[Rollout]:
    """The rollouts of a group, in their order in it; where one `member` of it is known, only its step is read. Raises
    `DataError` where the run has none of that id."""
    store, run = located.store, located.run.id
    first = member or await _first_of(store, run, group)
    same = each_rollout(store, run, split=first.split, step=first.step)
    return sorted([each async for each in same if each.group == group], key=lambda each: each.index)


async def _first_of(store: Store, run: str, group: str) -> Rollout:
    """A rollout of a group. One that does not have the name that the trainer gives is looked for among the first of the run."""
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
    """The groups beside that of a rollout, in the order of the step that looked at them, else as they were planned."""
    if record is not None and rollout.group in record.groups:
        return list(record.groups), ()
    page = await located.store.list_rollouts(located.run.id, split=rollout.split, step=rollout.step)
    return list(dict.fromkeys(each.group for each in page.items)), page.items


async def why_no_calls(store: Store, rollout: Rollout) -> str:
    """Why no call of a rollout is stored, in words."""
    if not rollout.attempt:
        return "it has not begun yet"
    if not rollout.status.ended:
        return "it has made no call yet"
    if await store.get_state(rollout.run, PRUNED):
        return "no call of it is stored: it made none, or `lightning db prune` removed them, as it did from this run"
    return "it made no model call"


async def may_change(store: Store, rollouts: list[Rollout]) -> bool:
    """Whether rollouts, or what training made of them, may still change."""
    if all(each.status.ended for each in rollouts) and (
        rollouts[0].split != "train" or any(each.trained_at_step is not None for each in rollouts)
    ):
        return False
    return not await is_over(store, rollouts[0].run)


def at_attempt(rollout: Rollout, attempt: int) -> Rollout:
    """A rollout as one of its attempts. Raises `DataError` for one that there was not."""
    if not 0 < attempt <= rollout.attempt:
        raise DataError(f"the rollout {rollout.id} has {rollout.attempt} attempts, so there is no attempt {attempt}")
    return replace(rollout, attempt=attempt)
