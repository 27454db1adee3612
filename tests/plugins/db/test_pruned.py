"""A pruned run can still be audited, or says that it cannot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.errors import StoreError
from lightning.store.sqlite import SqliteStore
from lightning.store.url import sqlite_url
from lightning.trainer.plan import train_rollouts, val_rollouts
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import all_rollouts, load_groups, record_step
from lightning.types import Outcome, Run, Task, Transition, VersionRun, logprobs, token_ids
from lightning_db.keeper import keeper_of
from lightning_db.prune import PruneRequest, carry_out, plan
from lightning_proof.audit import audit

ALGORITHM = LightningRL("grpo", group_size=4)
TASKS = [Task(f"question {number}") for number in range(3)]


async def trained(path: Path) -> SqliteStore:
    """Two steps of three groups, of which the first of each teaches nothing, and an evaluation."""
    rng = random.Random(3)
    store = SqliteStore(path)
    await store.open()
    await store.put_run(Run("run", "run", {"algorithm": describe_algorithm(ALGORITHM), "train_agents": []}))
    for step in (1, 2):
        await store.create_rollouts(train_rollouts("run", step, TASKS, 4, 2))
        await store.create_rollouts(val_rollouts("run", step - 1, TASKS, 2))
        for lease in await store.lease("run", "worker", limit=100):
            prompt, response = ([rng.randrange(100) for _ in range(count)] for count in (12, 6))
            call = Transition(
                lease.rollout.id,
                1,
                0,
                f"call-{lease.rollout.id}",
                token_ids(prompt),
                token_ids(response),
                logprobs([-rng.random() for _ in response]),
                versions=(VersionRun(0, step - 1),),
            )
            await store.append([call])
            same = lease.rollout.group.endswith("/0")
            await store.complete(lease.rollout.id, 1, Outcome(reward=1.0 if same else rng.random()))
        groups = await load_groups(store, await all_rollouts(store, "run", split="train", step=step), ())
        checkpoint = f"step-{step:08d}"
        batch = ALGORITHM.batch(groups)
        await store.commit_step(record_step("run", step, groups, batch, checkpoint=checkpoint, metrics={}, context={}))
    return store


async def test_an_audit_proves_as_much_after_pruning_as_before(tmp_path: Path) -> None:
    store = await trained(tmp_path / "store.db")
    keeper = keeper_of(sqlite_url(tmp_path / "store.db"))
    before = await audit(store, "run")
    assert (before.ok, before.rederived, before.rollouts) == (True, True, 16)
    plans = await plan(store, keeper, PruneRequest())
    assert set(plans[0].groups) == {
        "run/1/0",
        "run/2/0",
        *(f"run/val/{step}/{n}" for step in range(2) for n in range(3)),
    }
    await carry_out(store, keeper, plans)
    assert await audit(store, "run") == before
    await store.close()


async def test_an_audit_says_that_what_it_needs_was_removed(tmp_path: Path) -> None:
    store = await trained(tmp_path / "store.db")
    keeper = keeper_of(sqlite_url(tmp_path / "store.db"))
    await carry_out(store, keeper, await plan(store, keeper, PruneRequest(trained=True)))
    with pytest.raises(StoreError, match="lightning db prune --trained"):
        await audit(store, "run")
    await store.close()
