"""The list of runs at a place, filtered and sorted.

The invariant: what cannot be read is named and hides nothing else, and a store's file that is as it was is not read again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from lightning.errors import LightningError
from lightning.store.protocol import Store
from lightning.store.url import parse
from lightning.types import Run

from lightning_console.places import Places, key_of
from lightning_console.queries.runs import RunLine, known_line, line_of

LOOK: Final = 1000
"""Runs of a store that are listed, the newest."""
AT_ONCE: Final = 8
"""Stores that are read at a time."""


@dataclass(frozen=True, slots=True)
class RunList:
    """Runs from number `first` on of the `matched` ones of `total`. `unreadable` are reasons by store; `left_out` says of which
    stores older runs are not among them; `reading` that some are still being read."""

    lines: tuple[RunLine, ...]
    first: int
    matched: int
    total: int
    states: Mapping[str, int]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    reading: bool = False


ORDERS: Final[Mapping[str, Callable[[RunLine], object]]] = {
    "run": lambda line: line.id,
    "started": lambda line: line.created_at,
    "state": lambda line: line.state.name,
    "steps": lambda line: line.steps,
    "rollouts": lambda line: line.rollouts,
    "failed": lambda line: line.failed,
    "reward": lambda line: line.reward_with_failures,
    "held-out": lambda line: None if line.before is None else (line.after or line.before).score,
    "gain": lambda line: None if line.after is None or line.before is None else line.after.score - line.before.score,
    "alarms": lambda line: (sum(alarm.serious for alarm in line.alarms), len(line.alarms)),
}
"""What a list can be sorted by."""


@dataclass
class _Look:
    """What a look at a store finds: its runs, then their lines, or why it cannot be read. `stamp` is that of its file."""

    runs: list[Run] = field(default_factory=list)
    lines: list[RunLine] | None = None
    why: str = ""
    stamp: tuple[int, ...] | None = None


_looks: WeakKeyDictionary[Store, _Look] = WeakKeyDictionary()
_reading: dict[tuple[int, int], tuple[asyncio.Task[None], _Look]] = {}
_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def list_runs(
    places: Places,
    *,
    text: str = "",
    state: str = "",
    sort: str = "started",
    descending: bool = True,
    first: int = 0,
    limit: int = 100,
) -> RunList:
    """Runs at a place: those whose names, model or algorithm have the `text`, and which are in a `state` (empty: any but
    `session`); at most `limit` from number `first` on. Those that are not read after the patience of the places are there by
    their names. Raises `ConfigError` for a place that is none."""
    looks = await _look(places)
    unreadable, left_out = dict(places.unreadable), []
    lines: list[RunLine] = []
    for url, (store, look) in looks.items():
        if look.why:
            unreadable[url] = look.why
        else:
            lines += look.lines if look.lines is not None else [known_line(store, run, url) for run in look.runs]
            left_out += [url] if len(look.runs) == LOOK else []
    names = Counter(line.id for line in lines)
    lines = [replace(line, key=key_of(line.id, line.store if names[line.id] > 1 else "")) for line in lines]
    words = text.casefold().split()
    states: Counter[str] = Counter(line.state.name for line in lines)
    matched = [line for line in lines if _is_in(line, state) and _has(line, words)]
    return RunList(
        tuple(_sorted(matched, sort, descending)[first : first + limit]),
        first,
        len(matched),
        len(lines) - states["session"],
        dict(states),
        unreadable,
        tuple(left_out),
        any(look.lines is None and not look.why for _, look in looks.values()),
    )


async def _look(places: Places) -> dict[str, tuple[Store, _Look]]:
    """A look at each store, as far as it has come after the patience of the places."""
    loop, found, tasks = asyncio.get_running_loop(), {}, []
    limit = _limits.setdefault(loop, asyncio.Semaphore(AT_ONCE))
    for url, store in (await places.stores()).items():
        stamp = stamp_of_file(url)
        look = _looks.get(store)
        if look is None or stamp is None or look.stamp != stamp or not _is_settled(look):
            key = (id(loop), id(store))
            if key not in _reading:
                look = _Look(stamp=stamp)
                task = asyncio.create_task(_read(store, url, places.project, look, limit))
                _reading[key] = task, look
                task.add_done_callback(lambda _, key=key: _reading.pop(key, None))  # type: ignore[misc]
            task, look = _reading[key]
            tasks.append(task)
        found[url] = store, look
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=places.patience)
        for task in done:
            task.result()
    return found


async def _read(store: Store, url: str, project: str | None, look: _Look, limit: asyncio.Semaphore) -> None:
    async with limit:
        try:
            look.runs = await store.list_runs(project, limit=LOOK, brief=True)
            look.lines = [await line_of(store, run, url) for run in look.runs]
        except LightningError as error:
            look.why = str(error)
        else:
            _looks[store] = look


def _is_settled(look: _Look) -> bool:
    """Whether what was found can only change with the store."""
    return look.lines is not None and all(line.state.name != "running" for line in look.lines)


def stamp_of_file(url: str) -> tuple[int, ...] | None:
    """What changes when something is written into a database's file; None for a store that is no file of this machine."""
    if not url.startswith("sqlite:"):
        return None
    path = parse(url).path
    try:
        database = Path(path).stat()
    except OSError:
        return None
    try:
        log = Path(f"{path}-wal").stat()
    except OSError:
        return database.st_ino, database.st_size, database.st_mtime_ns, 0, 0
    return (database.st_ino, database.st_size, database.st_mtime_ns, log.st_size, log.st_mtime_ns if log.st_size else 0)


def _sorted(lines: Sequence[RunLine], sort: str, descending: bool) -> list[RunLine]:
    """The lines in an order; those that have nothing to be sorted by come last."""
    order = ORDERS.get(sort, ORDERS["started"])
    newest = sorted(lines, key=lambda line: line.created_at, reverse=True)
    known = [line for line in newest if order(line) is not None]
    known.sort(key=order, reverse=descending)  # type: ignore[arg-type]
    return [*known, *(line for line in newest if order(line) is None)]


def _is_in(line: RunLine, state: str) -> bool:
    return line.state.name == state if state else line.state.name != "session"


def _has(line: RunLine, words: Sequence[str]) -> bool:
    about = f"{line.id} {line.about.model} {line.about.algorithm} {line.store} {line.project}".casefold()
    return all(word in about for word in words)
