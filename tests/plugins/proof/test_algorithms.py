"""What each algorithm trained is derived again from the store alone, by the plugin name and arguments in the run's record."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from lightning import DPO, SFT, Distill
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS
from lightning.algorithms.protocol import Algorithm, head_of
from lightning.errors import ConfigError
from lightning.store.memory import MemoryStore
from lightning.trainer.plan import tasks_of_step, train_rollouts
from lightning.trainer.runs import describe_algorithm, rebuild_algorithm
from lightning.trainer.training_data import all_rollouts, fresh_values, load_groups, record_step
from lightning.types import Outcome, Run, StepRecord, Task, ToolEvent, Transition, logprobs, token_ids
from lightning_credits import Critic, GiGPO
from lightning_proof.audit import audit

ALGORITHMS: dict[str, Algorithm] = {
    **{name: LightningRL(name, group_size=3) for name in PRESETS},
    "shaped": LightningRL("dapo", group_size=3, overlong_tokens=6, overlong_buffer=4, tool_reward={"error": -0.25}),
    "credit-object": LightningRL("rloo", group_size=3, credit=GiGPO(gamma=0.9, omega=0.5)),
    "critic-object": LightningRL("ppo", group_size=3, credit=Critic(gamma=0.9, lam=0.5)),
    "dpo": DPO(group_size=3, pairs="all", tool_reward={"error": -0.25}),
    "sft": SFT(group_size=3, best=2, threshold=0.1),
    "distill": Distill("nowhere@3", group_size=3),  # an audit asks no teacher
}


async def trained(algorithm: Algorithm) -> MemoryStore:
    """A store with one committed step of two groups, whose rollouts have two calls and a tool run each."""
    rng = random.Random(5)
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run", {"algorithm": describe_algorithm(algorithm), "train_agents": []}))
    tasks = tasks_of_step([Task("a"), Task("b")], 0, 2, 0)
    await store.create_rollouts(train_rollouts("run", 1, tasks, algorithm.group_size, 2))
    for lease in await store.lease("run", "worker", limit=8):
        for seq in range(2):
            ids = [rng.randrange(50) for _ in range(rng.randrange(2, 6))]
            call = Transition(
                lease.rollout.id, lease.attempt, seq, f"{lease.rollout.id}-{seq}", token_ids([1, seq]), token_ids(ids),
                logprobs([-rng.random() for _ in ids]),
            )  # fmt: skip
            await store.append([call])
        tools = (ToolEvent("search", rng.choice(["ok", "error"])),)
        await store.complete(
            lease.rollout.id, lease.attempt, Outcome(reward=rng.choice([0.0, 0.5, 1.0]), tool_events=tools)
        )
    groups = await load_groups(store, await all_rollouts(store, "run", split="train", step=1), ())
    if head_of(algorithm):
        groups = await fresh_values(
            store, "run", 1, groups, lambda rows: [np.linspace(0, 1, len(row.spans), dtype=np.float32) for row in rows]
        )
    batch = algorithm.batch(groups)
    assert batch.samples
    await store.commit_step(record_step("run", 1, groups, batch, checkpoint="", metrics={}, context={}))
    return store


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_a_step_is_derived_again_and_other_rows_are_found(name: str) -> None:
    store = await trained(ALGORITHMS[name])
    report = await audit(store, "run")
    assert report.rederived
    assert report.ok, report.findings
    steps = store.steps

    async def changed(run: str) -> list[StepRecord]:
        return [replace(record, digest="0" * 64) for record in await steps(run)]

    store.steps = changed  # type: ignore[method-assign]
    assert any("its training rows are not" in finding.problem for finding in (await audit(store, "run")).findings)


@dataclass(frozen=True)
class OnesOwn:
    """A credit that is registered nowhere."""

    factor: float = 2.0

    def __call__(self, group, advantage):
        return [np.full(len(member.transitions), self.factor) for member in group.trajectories]


@pytest.mark.parametrize(
    "algorithm", [LightningRL(credit=OnesOwn()), LightningRL(credit="gigpo", tool_reward=OnesOwn())]
)
def test_an_object_that_only_its_author_can_make_is_recorded_but_not_made_again(algorithm: LightningRL) -> None:
    described = describe_algorithm(algorithm)
    assert "OnesOwn" in str(described["arguments"])
    assert rebuild_algorithm({"algorithm": described}) is None


def test_arguments_that_no_algorithm_takes_are_an_error_that_names_them() -> None:
    described = describe_algorithm(LightningRL()) | {"arguments": {"credit": {"gamma": 0.9}}}
    with pytest.raises(
        ConfigError, match=r"'lightning_rl' no longer takes the recorded arguments: credit=\{'gamma': 0.9\}"
    ):
        rebuild_algorithm({"algorithm": described})
