"""Trained weights as a resource: where their files lie, and what they are.

The invariant: a version names files by their content, so that whoever loads them can tell whether they are still the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from lightning.store.protocol import Store
from lightning.types import Json, Resource, ResourceKind

NAME = "policy/weights"
"""The resource that a run's trained model is a version of; the slash keeps it apart from every component's prompt."""


def weights_content(folder: Path) -> dict[str, Json]:
    """The content of a `weights` resource: the folder and the SHA-256 of each of its files. Raises `OSError` when they cannot
    be read."""
    files: dict[str, Json] = {}
    for file in sorted(folder.iterdir()):
        if file.is_file():
            with file.open("rb") as stream:
                files[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(folder.resolve()), "files": files}


async def keep_weights(store: Store, folder: Path, metadata: Mapping[str, Json]) -> Resource:
    """Make a trained model the next version of `policy/weights`."""
    content = await asyncio.to_thread(weights_content, folder)
    return await store.put_resource(Resource(NAME, content, ResourceKind.WEIGHTS, metadata))
