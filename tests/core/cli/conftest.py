"""A way to run commands, and a folder with a run in it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from lightning.cli.app import main
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.types import Fault, Outcome, Rollout, Run, StepRecord, Task


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def lightning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run `lightning ...` as its console script does."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["lightning", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        assert isinstance(code, int)
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder `runs` with one run `small`: two rollouts scored and trained, one failed, one pending."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    asyncio.run(_fill(sqlite_url(folder / "lightning.db")))
    return folder.parent


async def _fill(url: str) -> None:
    store = plugins().store(url)
    await store.open()
    await store.put_run(Run("small", "small", {"model": "models/tiny"}, 1000.0))
    made = [Rollout(id=f"small/{index}", run="small", task=Task(index), group="g", index=index) for index in range(4)]
    await store.create_rollouts(made)
    outcomes = [
        Outcome(reward=0.0),
        Outcome(reward=1.0),
        Outcome(fault=Fault.AGENT, error="ValueError: [no] number\nline 2"),
    ]
    leases = await store.lease("small", "worker", limit=3)
    for lease, outcome in zip(leases, outcomes, strict=True):
        await store.complete(lease.rollout.id, lease.attempt, outcome)
    trained = tuple((lease.rollout.id, lease.attempt) for lease in leases[:2])
    metrics = {"reward": 0.5, "loss": 0.125, "tokens": 12.0, "max_logprob_gap": 1e-5}
    await store.commit_step(StepRecord("small", 1, 1, trained, ("a", "b"), "c", metrics=metrics))
    await store.close()
