"""References to resources in settings and on the command line: `writer@production`, `runs/tuned#writer@3`.

The invariant: a reference names one resource; one that leads nowhere raises an error that lists the existing resources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.errors import ConfigError, StoreError
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.run_stages import PREFIX

from lightning_resources.nouns import LATEST, Resource
from lightning_resources.operations import get_resource, list_aliases, list_resources


@dataclass(frozen=True, slots=True)
class ResourceReference:
    """The reference `[PLACE#]NAME[@WHICH]`. `which` is a version or an alias. `place` names a store; empty: the store at
    hand."""

    name: str
    which: int | str = LATEST
    place: str = ""

    def __str__(self) -> str:
        return f"{self.place}#{self.name}@{self.which}" if self.place else f"{self.name}@{self.which}"


def parse_reference(text: str) -> ResourceReference:
    """Parse a reference, with or without the prefix `resource:`. Raises `ConfigError` when it has no name or an empty part."""
    place, hash_sign, rest = text.removeprefix(PREFIX).rpartition("#")
    name, at_sign, which = rest.partition("@")
    malformed = "@" in which or bool(hash_sign) != bool(place) or bool(at_sign) != bool(which)
    if not name or malformed or "://" in rest:
        shown = f"{redacted(place)}{hash_sign}{redacted(rest)}"
        raise ConfigError(
            f"{shown!r} names no resource: write NAME, NAME@ALIAS or NAME@VERSION, for one of another store PLACE#NAME@ALIAS"
        )
    return ResourceReference(name, int(which) if which.isdecimal() else which or LATEST, place)


async def find(store: Store, reference: ResourceReference) -> Resource:
    """Return the resource that a reference names in this store. Raises `StoreError`, which lists the existing versions and
    aliases."""
    found = await get_resource(store, reference.name, reference.which)
    if found is not None:
        return found
    there = [f"{alias.name}@{alias.alias}" for alias in await list_aliases(store)]
    versions = [str(resource.version) for resource in await list_resources(store, reference.name)]
    known = f"versions {', '.join(versions)}; " if versions else ""
    shown = replace(reference, place=redacted(reference.place))
    raise StoreError(f"there is no resource {shown}; there are: {known}{', '.join(there) or 'none'}")
