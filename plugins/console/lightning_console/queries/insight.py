"""What is wrong in a run, what past runs did better, and where its time went: `lightning advise` and `lightning profile`, kept.

The invariant: these answers are those of the commands. What takes long is computed beside everything else, and again only when
the run has gone on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning.errors import LightningError
from lightning.store.places import DATABASE, run_id_of
from lightning.store.protocol import Store
from lightning.store.url import parse
from lightning.types import Json, Run
from lightning_debug.advise import Advice, Past, advise, config_of, is_comparable, past_of
from lightning_debug.bottlenecks import Help, find_helps
from lightning_debug.profile import Profile, read_profile

from lightning_console.places import Located, Places
from lightning_console.queries.memo import Memo, apart, stamp_of
from lightning_console.queries.runs import ODD, about_of, said_of

OTHERS: Final = 200
"""Runs of a store that a run is compared with, the newest."""
SMALL: Final = 3000
"""A run of up to so many rollouts is profiled without being asked."""


@dataclass(frozen=True, slots=True)
class Advised:
    """Advice for a run; `why` says why there is none."""

    advice: Advice | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Profiled:
    """Where a run's time and tokens went, and what would help; `why` says why that cannot be said. `asked` is False where
    nobody has asked yet and the run is too long to do it without."""

    profile: Profile | None
    helps: tuple[Help, ...] = ()
    why: str = ""
    asked: bool = True


_advice: Memo[Advised] = Memo()
_profiles: Memo[Profiled] = Memo()
_past: Memo[Past | None] = Memo(kept=10 * OTHERS)


async def advice_of(places: Places, found: Located) -> Advised | None:
    """Alarms and advice for a run; None where they are not there after the patience of the places. Raises `StoreError`."""
    stores = await places.stores()

    async def make() -> Advised:
        past = await _past_runs(stores, found, places.project)
        try:
            return Advised(await advise(found.store, found.run.id, past))
        except ODD as error:
            return Advised(None, said_of(error))

    stamp = await stamp_of(found.store, found.run.id)
    return await _advice.soon(found.store, found.run.id, stamp, lambda: apart(make), places.patience)


async def _past_runs(stores: Mapping[str, Store], mine: Located, project: str | None) -> list[Past]:
    """The other runs of the same model and tasks."""
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

    about = (run.id, str(config.get("model")), id_of_tasks(config))
    return await _past.get(store, about, await stamp_of(store, run.id), make)


def id_of_tasks(config: Mapping[str, Json]) -> int:
    """What tells tasks from others while the console is open."""
    return hash(str(config.get("tasks")))


async def profile_of(places: Places, found: Located, rollouts: int, *, asked: bool) -> Profiled | None:
    """Where a run's time and tokens went; None where it is not there after the patience of the places. A run of many `rollouts`
    is profiled only when somebody `asked` for it."""
    if not asked and rollouts > SMALL:
        return Profiled(None, why=f"the run has {rollouts} rollouts: it takes a while", asked=False)

    async def make() -> Profiled:
        try:
            profile = await read_profile(found.store, found.run.id)
        except ODD as error:
            return Profiled(None, why=said_of(error))
        return Profiled(profile, tuple(find_helps(profile)))

    stamp = await stamp_of(found.store, found.run.id)
    return await _profiles.soon(found.store, found.run.id, stamp, lambda: apart(make), places.patience)


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
