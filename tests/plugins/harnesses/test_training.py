"""A training whose agent marks calls: what is trained, counted, proved and shown."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import lightning
import pytest
from lightning.cli.app import build
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import LLM, Task, Transition
from lightning_console.places import Places
from lightning_console.router import Address, show
from lightning_proof.audit import audit
from typer.testing import CliRunner

from tests.core.trainer.conftest import ALGORITHM
from tests.plugins.bench import bench

__all__ = ["bench"]


async def agent(task: Task, llm: LLM) -> float:
    """Name the task, throw a first answer away, and go on with the second."""
    async with httpx.AsyncClient(base_url=llm.base_url, headers={"authorization": f"Bearer {llm.api_key}"}) as client:

        async def ask(text: str, **headers: str) -> Any:
            body = {"model": llm.model, "messages": [{"role": "user", "content": text}]}
            reply = await client.post("/chat/completions", json=body, headers=headers)
            return reply.raise_for_status().json()

        with lightning.untrained("title"):
            await ask(f"name {task.input}")
        first = await ask(f"answer {task.input}")
        last = await ask(f"answer {task.input}", **{"x-lightning-rejected": first["id"]})
    return float(len(last["choices"][0]["message"]["content"]) % 3)


@pytest.fixture
async def trained(bench: Any, tmp_path: Path) -> AsyncIterator[Any]:
    async with bench(tmp_path / "run", agent, trainer__steps=1, trainer__eval_every=9) as made:
        await made.loop.run({})
        yield made


def marks(calls: tuple[Transition, ...]) -> list[str]:
    return [call.untrained for call in calls]


async def test_only_accepted_calls_are_trained_counted_proved_and_shown(trained: Any, tmp_path: Path) -> None:
    store = trained.store
    rollouts = await all_rollouts(store, "run", split="train", step=1)
    groups = await load_groups(store, rollouts, ())
    members = [member for group in groups for member in group.trajectories]
    assert [marks(member.transitions) for member in members] == [["title", "rejected", ""]] * len(members)
    batch = ALGORITHM.batch(groups)
    spans = [(span.rollout, span.seq, span.stop - span.start) for row in batch.samples for span in row.spans]
    used = {rollout.id for rollout in batch.used}
    assert used
    assert sorted(spans) == sorted(
        (call.rollout, call.seq, len(call.response_ids))
        for member in members
        for call in member.transitions
        if call.rollout in used and not call.untrained
    )
    (record, *_) = await store.steps("run")
    counted = {name: value for name, value in record.metrics.items() if name.startswith("calls_untrained/")}
    assert counted == {"calls_untrained/title": len(members), "calls_untrained/rejected": len(members)}
    assert (await audit(store, "run")).ok

    said = await asyncio.to_thread(
        CliRunner().invoke, build("runs"), ["runs", "show", "run", "--runs", str(tmp_path / "run")]
    )
    assert f"calls recorded and not trained: {len(members)} rejected; {len(members)} title" in said.output
    places = Places(str(tmp_path / "run"))
    page = str((await show(places, str(Address("rollout", ("run", members[0].rollout.id), {})))).to_json())
    await places.close()
    assert "ok, not trained: rejected" in page
    assert "ok; tries call 2 again" in page
    assert "it is recorded and not trained: title" in page


async def test_a_mark_that_was_changed_afterwards_is_found(trained: Any, tmp_path: Path) -> None:
    (record, *_) = await trained.store.steps("run")
    with closing(sqlite3.connect(tmp_path / "run" / "lightning.db")) as database:
        database.execute("UPDATE attempts SET labels = '{}' WHERE rollout = ?", (record.rollouts[0][0],))
        database.commit()
    report = await audit(trained.store, "run")
    assert not report.ok
    assert record.rollouts[0][0] in str(report.findings)
