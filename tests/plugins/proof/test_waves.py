"""Steps of several waves are audited."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.testing.fake_vllm import Reply
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Task
from lightning_proof.audit import audit

from tests.core.trainer.test_waves import DAPO


@pytest.fixture
def deterministic(answering: Any) -> Callable[[int], Any]:
    """`deterministic(seed)`: an agent whose rewards depend on its rollout alone; the seed only says how long it takes.

    Tasks 0 to 2 teach nothing.
    """

    def make(seed: int) -> Any:
        rng = random.Random(seed)

        async def agent(task: Task, llm: Any) -> float:
            rollout = jwt.decode(llm.api_key, options={"verify_signature": False})["sub"]
            await asyncio.sleep(rng.random() * 0.02)
            reward = await answering(replace(task, input=f"{task.input}, {rollout}"), llm)
            return 1.0 if str(task.input).endswith(("0", "1", "2")) else float(reward)

        return agent

    return make


def scripted(body: Any) -> Reply:
    """A policy whose answer is a function of the prompt."""
    return Reply("x" * (1 + zlib.crc32(body["messages"][-1]["content"].encode()) % 8))


async def outcome(made: Any) -> tuple[list[str], list[str], list[tuple[str, ...]]]:
    """Every step's rows, the weights, and what each step looked at."""
    records = await made.store.steps("run")
    report = await audit(made.store, "run")
    assert report.ok, report.findings
    return [record.digest for record in records], made.engine.ledger, [record.groups for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [LightningRL("grpo", group_size=4), DAPO], ids=["grpo", "dapo"])
async def test_two_runs_of_one_seed_are_equal(
    bench: Any, deterministic: Any, tmp_path: Path, algorithm: LightningRL
) -> None:
    outcomes = []
    for number in range(2):
        agent = deterministic(number)
        async with bench(tmp_path / str(number), agent, algorithm=algorithm, script=scripted) as made:
            await made.loop.run({})
            outcomes.append(await outcome(made))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) == len(outcomes[0][2]) == 3


async def test_a_step_goes_on_in_waves_until_enough_groups_teach(
    bench: Any, deterministic: Any, tmp_path: Path
) -> None:
    async with bench(tmp_path, deterministic(0), algorithm=DAPO, script=scripted, trainer__max_waves=6) as made:
        await made.loop.run({})
        records = await made.store.steps("run")
        rollouts = await all_rollouts(made.store, "run", split="train")
        assert (await audit(made.store, "run")).ok
    assert {record.metrics["groups_used"] for record in records} <= {2.0, 3.0}, "what teaches is trained, a third too"
    assert all(record.metrics["groups_used"] == record.metrics["groups_teaching"] for record in records)
    assert max(record.metrics["waves"] for record in records) > 1
    assert [len(record.groups) for record in records] == [2 * record.metrics["waves"] for record in records]
    assert {group for record in records for group in record.groups} == {rollout.group for rollout in rollouts}
    assert all(rollout.step == int(rollout.group.split("/")[1]) for rollout in rollouts)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "durable"), [(2, False), (4, True)])
async def test_a_crash_between_waves_changes_nothing(
    bench: Any, deterministic: Any, tmp_path: Path, place: int, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"algorithm": DAPO, "script": scripted, "trainer__max_waves": 6}
    async with bench(tmp_path / "whole", deterministic(0), **settings) as made:
        await made.loop.run({})
        expected = await outcome(made)
    async with bench(tmp_path / "cut", deterministic(1), **settings) as made:
        create = made.store.create_rollouts

        async def create_rollouts(rollouts: Sequence[Rollout]) -> int:
            here = any(rollout.group.endswith(f"/{place}") and rollout.split == "train" for rollout in rollouts)
            if here and not durable:
                raise made.Crash("before a wave")
            count = await create(rollouts)
            if here:
                raise made.Crash("at the beginning of a wave")
            return int(count)

        monkeypatch.setattr(made.store, "create_rollouts", create_rollouts)
        with pytest.raises(made.Crash):
            await made.loop.run({})
    monkeypatch.undo()
    async with bench(tmp_path / "cut", deterministic(2), **settings) as made:
        await made.loop.run({})
        assert await outcome(made) == expected
