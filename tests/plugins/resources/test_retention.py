"""Which versions of weights lose their files, and what of them stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning.store.memory import MemoryStore
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import list_resources, put_resource, roll_back_alias, set_alias
from lightning_resources.weights import WEIGHTS_NAME, superseded, weights_content


async def made(tmp_path: Path, versions: int) -> MemoryStore:
    store = MemoryStore()
    await store.open()
    for number in range(1, versions + 1):
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([number]) * 1000)
        await put_resource(store, Resource(WEIGHTS_NAME, weights_content(folder), ResourceKind.WEIGHTS))
    return store


async def test_the_newest_the_live_and_what_a_rollback_leads_to_keep_their_files(tmp_path: Path) -> None:
    store = await made(tmp_path, 8)
    for version in (1, 2, 4):
        await set_alias(store, WEIGHTS_NAME, "live", version)
    old = await superseded(store, WEIGHTS_NAME, 2)
    assert [version.number for version in old] == [1, 3, 5, 6], "7 and 8 are newest, 4 is live, a rollback leads to 2"
    assert [version.delete() for version in old] == [1000] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2", "v4", "v7", "v8"]
    assert await superseded(store, WEIGHTS_NAME, 2) == []
    assert len(await list_resources(store, WEIGHTS_NAME)) == 8
    await roll_back_alias(store, WEIGHTS_NAME, "live")
    assert [version.number for version in await superseded(store, WEIGHTS_NAME, 1)] == [7]
    await store.close()


async def test_files_that_are_others_now_or_that_a_kept_version_has_stay(tmp_path: Path) -> None:
    store = await made(tmp_path, 3)
    (tmp_path / "v1" / "model.safetensors").write_bytes(b"somebody's own")
    (tmp_path / "v2" / "notes.txt").write_text("mine")
    shared = weights_content(tmp_path / "v2")
    await put_resource(store, Resource(WEIGHTS_NAME, shared, ResourceKind.WEIGHTS))
    assert [version.number for version in await superseded(store, WEIGHTS_NAME, 1)] == [3], (
        "2 and 4 have a folder in common"
    )
    await put_resource(store, Resource("writer", "Write."))
    with pytest.raises(ConfigError, match="not weights"):
        await superseded(store, "writer", 1)
    await store.close()
