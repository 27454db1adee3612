"""Alarms and advice for the runs at a place, each run read once until it has changed.

The invariant: the list of runs and the page of a run show the same alarms, because both take them from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

from lightning.errors import LightningError
from lightning.store.protocol import Store
from lightning.types import Json, Run
from lightning_debug.advise import Advice, Past, advise, config_of, is_comparable, past_of

from lightning_console.places import Located, Places
from lightning_console.queries.memo import Memo, apart, stamp_of
from lightning_console.queries.runs import ODD, RunLine, about_of, keep_alarms, said_of

OTHERS: Final = 200
"""Most runs of a store that a run is compared with: the newest."""
WAIT: Final = 0.25
"""The share of a page's patience that the list of runs waits for alarms."""

_advice: Memo[Advice | str] = Memo()
_past: Memo[Past | None] = Memo(kept=10 * OTHERS)
_looking: WeakKeyDictionary[Places, asyncio.Task[None]] = WeakKeyDictionary()


async def look_at(places: Places, lines: Sequence[RunLine]) -> bool | None:
    """Find the alarms of the runs of these lines, one run after the other. Return whether runs were read for it; None if some
    are not read within the share `WAIT` of the patience of the places: these are read in the background."""
    new = [
        line for line in lines if line.steps and not line.unread and (not line.looked or line.state.name == "running")
    ]
    if not new:
        return False
    mine = (task := _looking.get(places)) is None or task.done()
    if task is None or mine:
        task = _looking[places] = asyncio.create_task(_look_at_all(places, new))
    await asyncio.wait([task], timeout=None if places.patience is None else WAIT * places.patience)
    return True if mine and task.done() else None


async def _look_at_all(places: Places, lines: Sequence[RunLine]) -> None:
    for line in lines:
        with suppress(*ODD):  # the list of runs says what is wrong with it
            await advice_of(places, await places.find(line.key), None)


async def advice_of(places: Places, found: Located, patience: float | None) -> Advice | str | None:
    """Return alarms and advice for a run, or a text that says why there are none; None if they are not ready within `patience`
    seconds (None: as long as they take). Raises `StoreError`."""
    stores = await places.stores()

    async def make() -> Advice | str:
        past = await _past_runs(stores, found, places.project)
        try:
            made = await advise(found.store, found.run.id, past)
        except ODD as error:
            return said_of(error)
        keep_alarms(found.store, found.run, made.alarms)
        return made

    stamp = await stamp_of(found.store, found.run.id)
    return await _advice.soon(found.store, found.run.id, stamp, lambda: apart(make), patience)


async def _past_runs(stores: Mapping[str, Store], mine: Located, project: str | None) -> list[Past]:
    """Return the other runs of the same model and tasks in these stores and the project, for the comparison of settings."""
    config, about = await config_of(mine.store, mine.run), await about_of(mine.store, mine.run)
    found = []
    for url, store in stores.items():
        try:
            others = await store.list_runs(project, limit=OTHERS, brief=True)
        except LightningError:  # the list of runs names a store that cannot be read
            continue
        for other in others:
            if url == mine.url and other.id == mine.run.id:
                continue
            try:
                theirs = await about_of(store, other)
                if (theirs.model, theirs.tasks, theirs.held_out) == (about.model, about.tasks, about.held_out):
                    past = await _past_run(store, other, config)
                    found += [past] if past else []
            except ODD:  # the list of runs says what is wrong with it
                continue
    return found


async def _past_run(store: Store, run: Run, config: Mapping[str, Json]) -> Past | None:
    async def make() -> Past | None:
        whole = await store.get_run(run.id)
        return await past_of(store, whole) if whole and is_comparable(config, whole.config) else None

    about = (run.id, str(config.get("model")), hash(str(config.get("tasks"))))
    return await _past.get(store, about, await stamp_of(store, run.id), make)
