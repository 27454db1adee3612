"""A branch is answered from its parent's record: that has to be of the same project."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightning.errors import StoreError
from lightning.store.memory import MemoryStore
from lightning.trainer.agents import of_project
from lightning.types import Rollout, Run, Task


async def test_a_parent_of_another_project_is_unknown() -> None:
    store = MemoryStore()
    await store.open()
    for project in ("ours", "theirs"):
        await store.put_run(Run(project, project, project=project))
        await store.create_rollouts([Rollout(f"{project}/0", project, Task("q"), f"{project}/g")])
    ours = of_project(store, "ours")
    branch = Rollout("ours/1", "ours", Task("q"), "ours/g", parent=("ours/0", 1, 0))
    for parent in ("theirs/0", "nobodys/0"):
        with pytest.raises(StoreError, match=f"rollout '{parent}' is unknown"):
            await ours.create_rollouts([replace(branch, parent=(parent, 1, 0))])
    assert await store.get_rollout("ours/1") is None
    assert await ours.create_rollouts([branch]) == 1
    await store.close()
