"""How a resource is named in settings and on the command line: `writer@production`, `runs/tuned#writer@3`.

The invariant: a reference names one resource, and one that leads nowhere is an error that says what there is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.errors import ConfigError, StoreError
from lightning.store.protocol import LATEST, Store
from lightning.store.url import parse, redacted, sqlite_url
from lightning.types import Resource

PREFIX = "resource:"
"""Begins a setting that names a resource instead of giving its content."""


DATABASE = "lightning.db"
RUN_FILE = "run.json"
"""The file in a run's folder, unless its run is kept elsewhere."""


@dataclass(frozen=True, slots=True)
class ResourceReference:
    """`[PLACE#]NAME[@WHICH]`: `which` is a version or an alias, `place` another store than the one at hand."""

    name: str
    which: int | str = LATEST
    place: str = ""

    def __str__(self) -> str:
        return f"{self.place}#{self.name}@{self.which}" if self.place else f"{self.name}@{self.which}"


def parse_reference(text: str) -> ResourceReference:
    """Take a reference apart, with or without its `resource:`. Raises `ConfigError` when it has no name or an empty part."""
    place, hash_sign, rest = text.removeprefix(PREFIX).rpartition("#")
    name, at_sign, which = rest.partition("@")
    malformed = "@" in which or bool(hash_sign) != bool(place) or bool(at_sign) != bool(which)
    if not name or malformed or "://" in rest:
        shown = f"{redacted(place)}{hash_sign}{redacted(rest)}"
        raise ConfigError(
            f"{shown!r} names no resource: write NAME, NAME@ALIAS or NAME@VERSION, for one of another store PLACE#NAME@ALIAS"
        )
    return ResourceReference(name, int(which) if which.isdecimal() else which or LATEST, place)


def split_reference(text: str, sign: str, *beside: Path) -> tuple[str, str, str]:
    """`text` at its last `sign`: what stands before it, the sign, and what stands behind. The whole and nothing where there is
    no sign, or where a folder or file, here or `beside`, has the whole for its name: what exists is meant."""
    if sign not in text or any((folder / text).exists() for folder in (Path(), *beside)):
        return text, "", ""
    return text.rpartition(sign)


async def find(store: Store, reference: ResourceReference) -> Resource:
    """The resource in this store. Raises `StoreError`, which names the versions and aliases there are."""
    found = await store.get_resource(reference.name, reference.which)
    if found is not None:
        return found
    there = [f"{alias.name}@{alias.alias}" for alias in await store.list_aliases()]
    versions = [str(resource.version) for resource in await store.list_resources(reference.name)]
    known = f"versions {', '.join(versions)}; " if versions else ""
    shown = replace(reference, place=redacted(reference.place))
    raise StoreError(f"there is no resource {shown}; there are: {known}{', '.join(there) or 'none'}")


def run_id_of(folder: Path) -> str:
    """The id of the run in a folder: what its `run.json` says, or the folder's name while there is none.

    A folder can be renamed; the run in it keeps its id.
    """
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["id"])
    except FileNotFoundError:
        return folder.resolve().name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / RUN_FILE} cannot be read ({error}): restore it, or give another `out`") from error


def store_in(folder: Path) -> str:
    """The URL of the store of a run in a folder: the database there, else what its `run.json` names; empty for neither."""
    if (folder / DATABASE).is_file():
        return sqlite_url((folder / DATABASE).resolve())
    try:
        kept = json.loads((folder / RUN_FILE).read_text())["store"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # a run that failed to start
    return kept if isinstance(kept, str) else ""


def existing_store(place: str) -> str:
    """The URL of the store at a place: a run's folder, a database file, or a URL. Raises `ConfigError` for a file that is not
    there, since opening it would make an empty one."""
    url = place
    if "://" not in place:
        path = Path(place)
        url = store_in(path) or sqlite_url((path / DATABASE if path.is_dir() else path).resolve())
    where = parse(url)
    if where.scheme == "sqlite" and not Path(where.path).is_file():
        raise ConfigError(
            f"there is no database at {redacted(place)!r}: give the folder of a run, a database file or a store's URL"
        )
    return url
