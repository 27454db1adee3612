"""Which versions of weights keep their files: the newest ones, and those that an alias points to or would after a rollback.

The invariant: a version itself is never changed, it only loses its files; no file goes that a kept version has too, or that is
not the one that the version was made of.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning.errors import ConfigError
from lightning.store.protocol import LATEST, Store
from lightning.types import Resource, ResourceKind


@dataclass(frozen=True, slots=True)
class SupersededVersion:
    """A version that may lose its `files`, all of them in `folder`; `size` is in bytes."""

    number: int
    folder: Path
    files: tuple[str, ...]
    size: int

    def delete(self) -> int:
        """Delete the files, and the folder where nothing else is in it. Returns the bytes."""
        for name in self.files:
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
        return self.size


async def superseded(store: Store, name: str, keep: int) -> list[SupersededVersion]:
    """The versions of weights beyond the newest `keep` that no alias needs and that still have files, oldest first.

    Raises `ConfigError` for a resource that is none of weights.
    """
    versions = await store.list_resources(name)
    if any(version.kind is not ResourceKind.WEIGHTS for version in versions):
        raise ConfigError(f"{name} is a {versions[0].kind.value}, not weights: it has no files")
    needed = {version.version for version in versions[-keep:]}
    for alias in await store.list_aliases(name):
        if alias.alias != LATEST:
            moves = [move.version for move in await store.alias_history(name, alias.alias)]
            needed |= {alias.version, *list(dict.fromkeys(reversed(moves)))[:2]}
    kept = {_folder(version) / file for version in versions if version.version in needed for file in _digests(version)}
    old = [version for version in versions if version.version not in needed]
    found = await asyncio.gather(*(asyncio.to_thread(_superseded, version, kept) for version in old))
    return [version for version in found if version.files]


def _superseded(version: Resource, kept: set[Path]) -> SupersededVersion:
    folder = _folder(version)
    files = [
        name for name, digest in _digests(version).items() if folder / name not in kept and _is(folder / name, digest)
    ]
    size = sum((folder / name).stat().st_size for name in files)
    return SupersededVersion(version.version, folder, tuple(files), size)


def _folder(version: Resource) -> Path:
    return Path(str(version.content.get("path"))) if isinstance(version.content, Mapping) else Path()


def _digests(version: Resource) -> Mapping[str, str]:
    files = version.content.get("files") if isinstance(version.content, Mapping) else None
    named = files if isinstance(files, Mapping) else {}
    return {str(name): str(digest) for name, digest in named.items() if "/" not in name}  # of this folder and no other


def _is(file: Path, digest: str) -> bool:
    """Whether it is there as the version was made of it."""
    if not file.is_file() or file.is_symlink():
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == digest
