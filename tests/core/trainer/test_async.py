"""Rollouts that go on while the engine trains: nothing is too old, nothing is lost, and a resume goes on exactly."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from lightning.audit import audit
from lightning.trainer.collect import all_rollouts
from lightning.trainer.summary import summarize
from lightning.types import StepRecord

STEPS, SIZE = 6, 4
ASYNC: dict[str, Any] = {"trainer__steps": STEPS, "trainer__max_staleness": 2, "trainer__eval_every": 2}


@pytest.fixture
def slow(answering: Any) -> Any:
    """An agent whose rollouts take very different times, a few of them as long as many others."""
    rng = random.Random(11)

    async def agent(task: Any, llm: Any) -> float:
        await asyncio.sleep(min(0.002 * rng.paretovariate(0.8), 0.3))
        return float(await answering(task, llm))

    return agent


async def assert_whole(made: Any, bound: int = 2) -> list[StepRecord]:
    """Every step in the weights once, every group in one step, everything fresh enough, and an audit that agrees."""
    records: list[StepRecord] = await made.store.list_steps("run")
    rollouts = {rollout.id: rollout for rollout in await all_rollouts(made.store, "run", split="train")}
    assert [record.step for record in records] == list(range(STEPS))
    assert len(made.engine.ledger) == STEPS
    assert made.policy.ledger == made.engine.ledger
    taken = [group for record in records for group in record.groups]
    assert len(taken) == len(set(taken))
    assert set(taken) == {rollout.group for rollout in rollouts.values()}, "nothing that was sampled is thrown away"
    begun = {rollout.group: rollout.step for rollout in rollouts.values()}
    for record in records:
        assert all(0 <= record.step - begun[group] <= bound for group in record.groups)
        assert 0 <= record.metrics["staleness_mean"] <= record.metrics["staleness_max"] <= bound
        for name, attempt in record.rollouts:
            for call in await made.store.transitions(name, attempt):
                assert begun[rollouts[name].group] <= call.version <= call.versions[-1].version <= record.step
    report = await audit(made.store, "run")
    assert report.ok, report.findings
    assert report.rederived
    return records


async def test_rollouts_go_on_while_the_engine_trains(bench: Any, slow: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, slow, **ASYNC) as made:
        await made.loop.run({})
        records = await assert_whole(made)
        summary = await summarize(made.store, "run")
    assert all(len(record.groups) == 2 for record in records)
    assert max(record.metrics["staleness_max"] for record in records) > 0, "some were sampled by older policies"
    assert (summary.steps, summary.rollouts, summary.failed, summary.drift_tokens) == (STEPS, STEPS * 8, 0, 0)
    assert [result.step for result in summary.evaluations] == [0, 2, 4, 6]
    assert [result.rollouts for result in summary.evaluations] == [3] * 4
