"""A run with a critic is audited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.store.protocol import Store
from lightning.types import Json
from lightning_proof.audit import audit

from tests.plugins.credits.test_ppo_in_the_loop import PPO

STEPS = 3


async def recorded(store: Store, step: int) -> Mapping[tuple[str, int, int], float]:
    kept = await store.get_state("run", f"values/{step}")
    assert isinstance(kept, list)
    return {(rollout, attempt, seq): value for rollout, attempt, seq, value in kept}


async def assert_whole(made: Any) -> None:
    """Each step is in the weights once, with values that a critic of that step gave, and an audit derives it again."""
    records = await made.store.steps("run")
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert len(made.engine.ledger) == STEPS
    for record in records:
        values = await recorded(made.store, record.step)
        trained = {call.key for attempt in record.rollouts for call in await made.store.transitions(*attempt)}
        assert values.keys() == trained
        assert {int(value) for value in values.values()} <= {record.step - 1}, "what that step's critic said"
    report = await audit(made.store, "run")
    assert report.ok, report.findings
    assert report.rederived


@pytest.mark.parametrize("staleness", [0, 2])
async def test_values_are_asked_once_a_step_and_kept(bench: Any, tmp_path: Path, staleness: int) -> None:
    async with bench(tmp_path, algorithm=PPO, trainer__max_staleness=staleness) as made:
        await made.loop.run({})
        await assert_whole(made)
        assert made.engine.valued == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step:1", "committed:2"])
async def test_a_resume_replays_with_the_values_that_were_used(
    bench: Any, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, algorithm=PPO, trainer__checkpoint_every=STEPS) as made:
        made.engine.crash_at = where
        crash_after_commit(made, where, monkeypatch)
        with pytest.raises(made.Crash):
            await made.loop.run({})
        committed = len(await made.store.steps("run"))
        kept = [await recorded(made.store, step) for step in range(1, committed + 1)]
    monkeypatch.undo()
    async with bench(tmp_path, algorithm=PPO, trainer__checkpoint_every=STEPS) as made:
        await made.loop.restore()
        assert len(made.engine.ledger) == committed >= 1
        assert made.engine.valued == 0, "a replay asks no critic"
    async with bench(tmp_path, algorithm=PPO, trainer__checkpoint_every=STEPS) as made:
        await made.loop.run({})
        await assert_whole(made)
        assert [await recorded(made.store, step) for step in range(1, committed + 1)] == kept


def crash_after_commit(made: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = made.store.commit_step

    async def commit_step(record: Any) -> None:
        await commit(record)
        if where == f"committed:{record.step}":
            raise made.Crash(where)

    monkeypatch.setattr(made.store, "commit_step", commit_step)


@pytest.mark.slow
async def test_values_that_are_gone_or_changed_are_found(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, algorithm=PPO) as made:
        await made.loop.run({})
        rows: Json = await made.store.get_state("run", "values/1")
        assert isinstance(rows, list)
        rollout, attempt, seq, value = rows[0]  # type: ignore[misc]
        await made.store.put_state("run", "values/1", [[rollout, attempt, seq, value + 1e-3], *rows[1:]])  # type: ignore[operator]
        findings = (await audit(made.store, "run")).findings
        assert [(finding.step, finding.problem) for finding in findings] == [
            (1, "its training rows are not the ones the engine computed on")
        ]
        await made.store.put_state("run", "values/1", rows[1:])
        findings = (await audit(made.store, "run")).findings
        assert len(findings) == 1
        assert f"values of step 1 are not in the store (rollout {rollout} attempt {attempt} call {seq})" in (
            findings[0].problem
        )
