"""A folder of runs that has a rollout of two turns, recorded through the gateway; and a run in one process, as the core tests
have it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.testing import RolloutRecord, rollout
from lightning.types import Outcome, Rollout, Run, Task

from tests.plugins.bench import bench  # noqa: F401 — a fixture

AGENT = """
import httpx

def ask(llm, content):
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)
    if reply.is_error:
        raise RuntimeError(reply.json()["error"]["message"])
    return reply.json()["choices"][0]["message"]["content"]

def agent(task, llm):
    return float(len(ask(llm, "And then? " + ask(llm, f"Do {task.input}"))))

def changed(task, llm):
    return float(len(ask(llm, "And now? " + ask(llm, f"Do {task.input}"))))
"""


async def store_record(url: str, record: RolloutRecord, reward: float) -> None:
    """Put what was recorded elsewhere into a store, as a run named `run`."""
    store = plugins().store(url)
    await store.open()
    made = record.rollout
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout(made.id, "run", made.task, "g")])
    await store.lease("run", "worker", limit=1)
    await store.append(record.transitions)
    await store.complete(made.id, 1, Outcome(reward=reward, tool_events=record.tool_events))
    await store.close()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a module `two_turns` with agents, and `runs/one` with a rollout of one of them."""
    (tmp_path / "two_turns.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import two_turns  # type: ignore[import-not-found]

    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    record = rollout(two_turns.agent, Task("a task"), ["first", "second"], adapters=("raw",))
    asyncio.run(store_record(sqlite_url(folder / "lightning.db"), record, 6.0))
    yield tmp_path
    sys.modules.pop("two_turns")
