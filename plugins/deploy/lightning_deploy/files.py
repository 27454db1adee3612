"""Generated files in a folder that people own: what they changed is kept, what they did not is replaced.

The invariant: a file that somebody has edited is never overwritten, unless they say so.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_deploy.render import SCRIPTS

RECORD = ".generated.json"
"""Digests of the files as they were generated."""


@dataclass(frozen=True, slots=True)
class Written:
    """Paths by what became of them."""

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    kept: tuple[str, ...]


def write(files: Mapping[str, str], folder: Path, *, force: bool = False) -> Written:
    """Write what is new or was not edited; with `force`, all of it."""
    digests = _record(folder)
    written, unchanged, kept = [], [], []
    for name, text in files.items():
        there = _read(folder / name)
        edited = there is not None and digests.get(name) != _digest(there)
        if there == text:
            unchanged.append(name)
        elif edited and not force:
            kept.append(name)
            continue
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
            written.append(name)
        if Path(name).name in SCRIPTS:
            (folder / name).chmod(0o755)
        digests[name] = _digest(text)
    if any(name.startswith("scripts/") for name in files):
        (folder / "wheels").mkdir(exist_ok=True)  # for lightning's own, which build.sh and apply.sh make
    (folder / RECORD).write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return Written(tuple(written), tuple(unchanged), tuple(kept))


def diff(files: Mapping[str, str], folder: Path) -> Iterator[str]:
    """The lines in which generated files differ from those in the folder: what writing them would change."""
    for name, text in files.items():
        there = _read(folder / name)
        if there != text:
            before = [] if there is None else there.splitlines(keepends=True)
            shown = "/dev/null" if there is None else f"{folder}/{name}"
            yield from difflib.unified_diff(
                before, text.splitlines(keepends=True), shown, f"{folder}/{name}, generated"
            )


def _record(folder: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
