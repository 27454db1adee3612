"""Declared reuse is audited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.cli.app import build
from lightning.errors import DataError
from lightning.store.protocol import Store
from lightning.types import Json, Rollout, Run, StepRecord
from lightning_proof.audit import audit
from lightning_session.session import Session
from typer.testing import CliRunner

from tests.plugins.session.test_reuse import BUFFER, TASKS, Open, take

EVERY_CALL = LightningRL("reinforce++", group_size=4, entropy_coefficient=0.01)
"""Which trains every rollout, whatever its reward is."""


async def buffered(session: Session, steps: int) -> list[dict[str, float]]:
    """Steps that each train the step before's rollouts once more."""
    found, old = [], list[Group]()
    for _ in range(steps):
        new = await session.rollout(TASKS)
        found.append(await take(session, [*new, *old]))
        old = new
    return found


async def test_what_is_trained_again_is_declared_counted_and_audited(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", algorithm=EVERY_CALL, **BUFFER) as made:
        async with Session(made.loop) as session:
            metrics = await buffered(session, 3)
        assert [step.get("reused") for step in metrics] == [None, 8.0, 8.0]
        assert [step["rollouts"] for step in metrics] == [8.0, 8.0, 8.0]  # what was sampled
        records = await made.store.steps("run")
        assert [len(record.rollouts) for record in records] == [8, 16, 16]
        first = {name for name, _ in records[0].rollouts}
        assert set(records[1].context["reuse"]["rollouts"]) == first
        assert records[1].context["reuse"]["limit"] == 1
        assert "reuse" not in records[0].context
        kept = await made.store.get_rollout(min(first))
        assert kept.trained_at_step == 1
        report = await audit(made.store, "run")
        assert report.ok, report.findings
        assert (report.steps, report.rollouts, report.reused) == (3, 24, 16)
        assert report.rederived
    said = await asyncio.to_thread(CliRunner().invoke, build("audit"), ["audit", str(tmp_path / "run")])
    assert "3 steps, 24 training rollouts, trained 16 times again (declared as reused)" in said.output
    assert "as it was trained" in said.output


async def test_a_reuse_beyond_the_allowed_age_is_refused(bench: Open, tmp_path: Path) -> None:
    settings = {**BUFFER, "trainer__max_reuse": 9, "trainer__max_staleness": 1}
    async with bench(tmp_path / "run", **settings) as made, Session(made.loop) as session:
        groups = await session.rollout(TASKS)
        for _ in range(2):
            await take(session, groups)
        with pytest.raises(DataError, match=r"older than trainer.max_staleness = 1"):
            await session.batch(groups)
        assert (await audit(made.store, "run")).ok


async def test_a_loop_that_was_killed_goes_on_with_an_empty_buffer(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", algorithm=EVERY_CALL, **BUFFER) as made:

        async def killed() -> None:
            async with Session(made.loop) as session:
                await buffered(session, 1)
                made.engine.crash_at = "save:2"
                old = await session.rollout(TASKS)
                await take(session, old)

        with pytest.raises(made.Crash):
            await killed()
    async with bench(tmp_path / "run", algorithm=EVERY_CALL, **BUFFER) as made:
        async with Session(made.loop) as session:
            assert session.step == 1
            await buffered(session, 2)
        report = await audit(made.store, "run")
        assert (report.ok, report.steps, report.reused) == (True, 3, 8)


class Tampered:
    """A store whose records, rollouts or settings were changed behind everybody's back."""

    def __init__(
        self,
        store: Store,
        *,
        record: Callable[[StepRecord], StepRecord] = lambda record: record,
        rollout: Callable[[Rollout], Rollout] = lambda rollout: rollout,
        config: Callable[[Json], Json] = lambda config: config,
    ) -> None:
        self.store, self.record, self.rollout, self.config = store, record, rollout, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def steps(self, run: str) -> list[StepRecord]:
        return [self.record(record) for record in await self.store.steps(run)]

    async def list_rollouts(self, run: str, **filters: Any) -> Any:
        page = await self.store.list_rollouts(run, **filters)
        return replace(page, items=tuple(map(self.rollout, page.items)))

    async def get_run(self, run: str) -> Run:
        stored: Any = await self.store.get_run(run)
        return replace(stored, config={**stored.config, "config": self.config(stored.config["config"])})


def _declares(record: StepRecord, **changes: object) -> StepRecord:
    declared: Any = record.context.get("reuse", {"limit": 1, "rollouts": []})
    return replace(record, context={**record.context, "reuse": {**declared, **changes}})


def _undeclared(record: StepRecord) -> StepRecord:
    return replace(record, context={key: value for key, value in record.context.items() if key != "reuse"})


PLANTED: dict[str, dict[str, Any]] = {
    "not declared as reused": {"record": _undeclared},
    "no step before trained it": {
        "record": lambda record: _declares(record, rollouts=[record.rollouts[0][0]]) if record.step == 1 else record
    },
    "and trainer.max_reuse = 0": {
        "config": lambda config: {**config, "trainer": {**config["trainer"], "max_reuse": 0}}
    },
    "under trainer.max_reuse = 7, and the run's is 1": {
        "record": lambda record: _declares(record, limit=7) if record.step > 1 else record
    },
    "which is later": {"rollout": lambda rollout: replace(rollout, step=3)},
    "marked as trained at step None": {"rollout": lambda rollout: replace(rollout, trained_at_step=None)},
    "marked as trained at step 2": {"rollout": lambda rollout: replace(rollout, trained_at_step=2)},
    "says not which rollouts": {
        "record": lambda record: _declares(record, limit="many") if record.step > 1 else record
    },
    "which it does not train": {
        "record": lambda record: _declares(record, rollouts=["x"]) if record.step > 1 else record
    },
}


@pytest.mark.parametrize("problem", PLANTED)
async def test_each_violation_that_is_planted_is_found(bench: Open, tmp_path: Path, problem: str) -> None:
    async with bench(tmp_path / "run", algorithm=EVERY_CALL, **BUFFER) as made:
        async with Session(made.loop) as session:
            await buffered(session, 2)
        assert (await audit(made.store, "run")).ok
        report = await audit(Tampered(made.store, **PLANTED[problem]), "run")  # type: ignore[arg-type]
        assert any(problem in finding.problem for finding in report.findings), report.findings


async def test_a_run_of_a_release_without_the_setting_is_audited(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made:
        async with Session(made.loop) as session:
            await take(session, await session.rollout(TASKS))

        def older(config: Any) -> Json:
            return {**config, "trainer": {key: item for key, item in config["trainer"].items() if key != "max_reuse"}}

        assert (await audit(Tampered(made.store, config=older), "run")).ok  # type: ignore[arg-type]
