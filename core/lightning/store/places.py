"""Where runs and their stores lie: what a folder has, and what a place names.

The invariant: a folder can be renamed, and the run in it keeps its id; naming a place makes nothing there.
"""

from __future__ import annotations

import json
from pathlib import Path

from lightning.errors import ConfigError
from lightning.store.url import parse, redacted, sqlite_url

DATABASE = "lightning.db"
RUN_FILE = "run.json"
"""The file in a run's folder, unless its run is kept elsewhere."""


def split_reference(text: str, sign: str, *beside: Path) -> tuple[str, str, str]:
    """`text` at its last `sign`: what stands before it, the sign, and what stands behind. The whole and nothing where there is
    no sign, or where a folder or file, here or `beside`, has the whole for its name: what exists is meant."""
    if sign not in text or any((folder / text).exists() for folder in (Path(), *beside)):
        return text, "", ""
    return text.rpartition(sign)


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
