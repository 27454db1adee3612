"""Finds the run in a folder and the store that a place names.

The invariant: a run keeps its id if its folder is renamed. Looking at a place creates nothing there.
"""

from __future__ import annotations

import json
from pathlib import Path

from lightning.errors import ConfigError
from lightning.store.url import parse, redacted, sqlite_url

DATABASE = "lightning.db"
RUN_FILE = "run.json"
"""The store of a run in its folder, unless the run has another store."""


def split_reference(text: str, sign: str, *beside: Path) -> tuple[str, str, str]:
    """Split `text` at its last `sign` into the parts before it, the sign, and the part behind. Return `text` and two empty
    texts if it has no sign, or if a file or folder with the name `text` exists here or in one of the folders `beside`."""
    if sign not in text or any((folder / text).exists() for folder in (Path(), *beside)):
        return text, "", ""
    return text.rpartition(sign)


def policy_in(folder: Path) -> tuple[Path, str]:
    """Split RUN/model/NAME, the folder of one policy's model in a run's folder, into RUN and NAME. Return any other folder, and
    an empty name. The model need not lie there: a step of the policy is written RUN/model/NAME@STEP."""
    run = folder.parent.parent
    return (run, folder.name) if folder.parent.name == "model" and store_in(run) else (folder, "")


def run_id_of(folder: Path) -> str:
    """Return the id of the run in a folder: the one in its `run.json`, or the folder's name if there is no such file.

    Raises `ConfigError` for a `run.json` that cannot be read.
    """
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["id"])
    except FileNotFoundError:
        return folder.resolve().name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / RUN_FILE} cannot be read ({error}): restore it, or give another `out`") from error


def store_in(folder: Path) -> str:
    """Return the URL of the store of a run in a folder: the database there, or else the store that `run.json` names; empty for
    neither."""
    if (folder / DATABASE).is_file():
        return sqlite_url((folder / DATABASE).resolve())
    try:
        kept = json.loads((folder / RUN_FILE).read_text())["store"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # a run that failed to start
    return kept if isinstance(kept, str) else ""


def existing_store(place: str) -> str:
    """Return the URL of the store at a place: a run's folder, a database file, or a URL. Raises `ConfigError` for a missing
    file, because opening it would create an empty one."""
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
