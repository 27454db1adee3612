"""Prompts, weights and settings: their versions, what each earned, and where aliases point and pointed.

The invariant: of a store that several projects share, only the project that is asked for is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning.errors import DataError, LightningError
from lightning.store.protocol import Store
from lightning.trainer.run_server import of_project
from lightning_resources.nouns import LATEST, Alias, Resource, ResourceUse
from lightning_resources.operations import alias_history, list_aliases, list_resources, resource_uses

from lightning_console.places import Places, mark_of

MOST_VERSIONS: Final = 200
"""Versions of a resource that are told: the newest."""
MOST_MOVES: Final = 200


@dataclass(frozen=True, slots=True)
class ResourceLine:
    """A resource of a store. `mark` tells it from one of the same name in another store."""

    name: str
    kind: str
    versions: int
    aliases: Mapping[str, int]
    created_at: float
    store: str
    mark: str


@dataclass(frozen=True, slots=True)
class ResourceView:
    """A resource: its versions and what was earned under them, newest first, and the moves of each of its aliases, the latest
    first. `elsewhere` are the marks of other stores that have one of this name; `left_out` counts older versions."""

    name: str
    store: str
    mark: str
    versions: tuple[Resource, ...]
    uses: tuple[ResourceUse, ...]
    aliases: tuple[Alias, ...]
    moves: Mapping[str, tuple[Alias, ...]]
    elsewhere: Mapping[str, str]
    left_out: int = 0

    def version(self, number: int) -> Resource:
        """A version by its number. Raises `DataError` for one that is not there."""
        found = next((each for each in self.versions if each.version == number), None)
        if found is None:
            raise DataError(f"{self.name} has no version {number}, or one older than those that are told")
        return found


async def resource_lines(places: Places) -> tuple[list[ResourceLine], dict[str, str]]:
    """The resources of all stores at a place, and why stores could not be read, by URL."""
    lines: list[ResourceLine] = []
    stores = await _stores(places)
    unreadable = dict(places.unreadable)
    for url, store in stores.items():
        try:
            found, aliases = await list_resources(store), await list_aliases(store)
        except LightningError as error:
            unreadable[url] = str(error)
            continue
        by_name: dict[str, list[Resource]] = {}
        for each in found:
            by_name.setdefault(each.name, []).append(each)
        for name, versions in by_name.items():
            pointing = {alias.alias: alias.version for alias in aliases if alias.name == name and alias.alias != LATEST}
            newest = versions[-1]
            lines.append(
                ResourceLine(name, str(newest.kind), len(versions), pointing, newest.created_at, url, mark_of(url))
            )
    return lines, unreadable


async def resource_view(places: Places, name: str, mark: str = "") -> ResourceView:
    """A resource by its name, of the store with a mark, else of the first that has it. Raises `DataError` where none has."""
    having: dict[str, tuple[str, Store, list[Resource]]] = {}
    for url, store in (await _stores(places)).items():
        try:
            if found := await list_resources(store, name):
                having[mark_of(url)] = url, store, found
        except LightningError:
            continue  # the list of resources names it
    if not having or (mark and mark not in having):
        raise DataError(f"there is no resource {name[:200]!r} here")
    chosen = mark or next(iter(having))
    url, store, versions = having[chosen]
    aliases = await list_aliases(store, name)
    moves = {
        alias.alias: tuple(reversed(await alias_history(store, name, alias.alias)))[:MOST_MOVES]
        for alias in aliases
        if alias.alias != LATEST
    }
    return ResourceView(
        name,
        url,
        chosen,
        tuple(reversed(versions))[:MOST_VERSIONS],
        tuple(await resource_uses(store, name)),
        tuple(aliases),
        moves,
        {other: having[other][0] for other in having if other != chosen},
        max(0, len(versions) - MOST_VERSIONS),
    )


async def _stores(places: Places) -> dict[str, Store]:
    """The stores as the project sees them."""
    stores = await places.stores()
    project = places.project
    return stores if project is None else {url: of_project(store, project) for url, store in stores.items()}
