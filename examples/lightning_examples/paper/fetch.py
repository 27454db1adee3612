"""Gets the archives of data sets, and writes tasks as `lightning train --tasks` reads them.

The invariant: a file that exists is whole; what was not wholly received is never under its name.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

from lightning.errors import DataError
from lightning.types import Task

_DRIVE = "https://drive.usercontent.google.com/download?id={id}&export=download&confirm=t"
_SECONDS = 60
"""Without a byte for so long, a download has failed."""


def from_drive(file_id: str, archive: Path) -> Path:
    """A public zip file of Google Drive, unless it is there already. Raises `DataError` when something else comes."""
    if archive.is_file():
        return archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(archive.name + ".partial")
    url = _DRIVE.format(id=file_id)
    by_hand = f"open https://drive.google.com/file/d/{file_id}/view in a browser and save it as {archive}"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as reply, partial.open("wb") as file:  # noqa: S310 — https
            shutil.copyfileobj(reply, file)
    except OSError as error:
        raise DataError(f"cannot download {url} ({error}): {by_hand}") from error
    if not zipfile.is_zipfile(partial):
        raise DataError(f"{url} gave no zip file (Google Drive limits how often a file is downloaded): {by_hand}")
    return partial.replace(archive)


def archive_folder(about: str | None, file_id: str, name: str, unpack: str, wanted: str) -> tuple[Path, Path]:
    """The command line of a `prepare`: the folder that it names, and the one inside of the unpacked archive that has `wanted`.
    What is there already is used again."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", type=Path, help=f"{name}, if you have it already")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = options.folder.resolve()
    return folder, unpacked(options.archive or from_drive(file_id, folder / name), folder / unpack, wanted)


def unpacked(archive: Path, folder: Path, wanted: str) -> Path:
    """Unpack an archive and return the folder inside that has the file `wanted`. Raises `DataError` when none has."""
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(partial)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{archive} cannot be unpacked ({error}): delete it and run this again") from error
        partial.rename(folder)
    found = sorted(path.parent for path in folder.rglob(wanted) if "__MACOSX" not in path.parts)
    if not found:
        raise DataError(f"{archive} has no {wanted}: is it another data set's archive? Delete {folder} after a change")
    return found[0]


def write_tasks(tasks: Iterable[Task], file: Path) -> int:
    """Write tasks as JSON lines; how many there were."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as lines:
        for count, task in enumerate(tasks, 1):  # noqa: B007 — the last number is the answer
            row = {"id": task.id, "input": task.input, "expected": task.expected, "metadata": dict(task.metadata)}
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.replace(file)
    return count
