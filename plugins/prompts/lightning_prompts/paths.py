"""Files that are named by data: always under the folder they belong to.

The invariant: a name that comes out of a store, a plugin or an agent's code leads to a file below its root or to an error.
"""

from __future__ import annotations

from pathlib import Path

from lightning.errors import DataError


def inside(root: Path, name: str) -> Path:
    """`root/name`. Raises `DataError` for a name that is absolute or empty, climbs (`..`), holds a NUL, or passes through a
    symbolic link below the root."""
    parts = Path(name).parts
    climbs = not parts or ".." in parts or Path(name).is_absolute() or "\0" in name or "\\" in name
    if climbs:
        raise DataError(f"{name!r} cannot name a file below {root}: use a plain name, without .. and no absolute path")
    file = root
    for part in parts:
        file /= part
        if file.is_symlink():
            raise DataError(f"{name!r} leads out of {root}: {file} is a symbolic link; remove it")
    return file
