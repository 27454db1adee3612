"""A trained model as a version of a resource."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lightning.store.memory import MemoryStore
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import put_resource
from lightning_resources.weights import WEIGHTS_NAME, keep_weights


async def test_the_same_files_are_the_same_version_and_others_the_next(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "folder").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"one")
    store = MemoryStore()
    await store.open()
    await put_resource(store, Resource("policy", "a component may have this name"))
    first = await keep_weights(store, model, {"run": "a", "reward": 0.5})
    assert await keep_weights(store, model, {"run": "a"}) == first
    assert (first.name, first.kind, first.version) == (WEIGHTS_NAME, ResourceKind.WEIGHTS, 1)
    digest = hashlib.sha256(b"one").hexdigest()
    assert first.content == {"path": str(model), "files": {"model.safetensors": digest}}
    (model / "model.safetensors").write_bytes(b"two")
    assert (await keep_weights(store, model, {})).version == 2
    await store.close()
