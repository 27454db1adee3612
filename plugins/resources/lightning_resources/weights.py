"""A run's weights as versions of a resource: how a version describes its files, and which versions keep them.

The invariant: a version has the digests of its files, so that loading them can check that they are still the same. A version
never changes, but may lose its files. The newest versions keep theirs, and so do those that an alias points to or would after a
rollback. A file is not deleted if a kept version has it too, or if its content is no longer that of the version.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning.errors import ConfigError
from lightning.store.protocol import Store
from lightning.trainer.model import resolve_model
from lightning.types import POLICY, Json

from lightning_resources.nouns import LATEST, Resource, ResourceKind
from lightning_resources.operations import alias_history, list_aliases, list_resources, put_resource

WEIGHTS_NAME: Final = "policy/weights"
"""The resource whose versions are the trained models of runs; the slash keeps it apart from the prompts of components."""


def weights_name(policy: str) -> str:
    """Return the name of the resource whose versions are the models of a policy: `WEIGHTS_NAME` for the one policy of a run,
    `policy/NAME/weights` for one of several."""
    return WEIGHTS_NAME if policy == POLICY else f"policy/{policy}/weights"


def is_weights_name(name: str) -> bool:
    """Whether a resource of this name has models of a policy."""
    return name.startswith("policy/") and name.endswith("/weights")


def weights_content(folder: Path) -> dict[str, Json]:
    """Return the content of a `weights` resource: the folder and the SHA-256 of each of its files. Raises `OSError` when they
    cannot be read."""
    files: dict[str, Json] = {}
    for file in sorted(folder.iterdir()):
        if file.is_file():
            with file.open("rb") as stream:
                files[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(folder.resolve()), "files": files}


def checked_weights(resource: Resource) -> Path:
    """Return the folder of a version of weights, after checking that its files are unchanged. Raises `ConfigError`
    otherwise."""
    name, content = f"{resource.name}@{resource.version}", resource.content
    if resource.kind is not ResourceKind.WEIGHTS:
        raise ConfigError(f"{name} is a {resource.kind.value}, not weights")
    folder = _folder(resource)
    try:
        now = weights_content(folder)
    except (OSError, ValueError) as error:  # a path may hold the character NUL
        raise ConfigError(f"{name} cannot be read ({error}): bring {folder} back, or name another version") from error
    if not isinstance(content, Mapping) or now["files"] != content.get("files"):
        raise ConfigError(f"the files in {folder} are not those of {name} any more: something has overwritten them")
    return resolve_model(folder)


async def keep_weights(store: Store, folder: Path, metadata: Mapping[str, Json], policy: str = POLICY) -> Resource:
    """Make a policy's trained model the next version of its resource (`weights_name`)."""
    content = await asyncio.to_thread(weights_content, folder)
    return await put_resource(store, Resource(weights_name(policy), content, ResourceKind.WEIGHTS, metadata))


@dataclass(frozen=True, slots=True)
class SupersededVersion:
    """A version whose `files`, all in `folder`, may be deleted; `size` is their size in bytes."""

    number: int
    folder: Path
    files: tuple[str, ...]
    size: int

    def delete(self) -> int:
        """Delete the files, and the folder if it is then empty. Returns the number of bytes."""
        for name in self.files:
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
        return self.size


async def superseded(store: Store, name: str, keep: int) -> list[SupersededVersion]:
    """Return the versions of weights whose files may be deleted, oldest first: those that still have files, are older than the
    newest `keep`, and that no alias points to or would after a rollback.

    Raises `ConfigError` for a resource that is not weights.
    """
    versions = await list_resources(store, name)
    if any(version.kind is not ResourceKind.WEIGHTS for version in versions):
        raise ConfigError(f"{name} is a {versions[0].kind.value}, not weights: it has no files")
    needed = {version.version for version in versions[-keep:]}
    for alias in await list_aliases(store, name):
        if alias.alias != LATEST:
            moves = [move.version for move in await alias_history(store, name, alias.alias)]
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
    """Whether the file exists, is no link, and has this digest."""
    if not file.is_file() or file.is_symlink():
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == digest
