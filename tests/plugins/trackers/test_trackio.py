"""The tracker `trackio` against the real library and its local database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.trackers.conftest import Tell


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trackio's database of this test: the library reads its folder when it is imported."""
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_PROJECT", "agents")
    return sqlite_storage.SQLiteStorage


async def test_a_run_is_in_trackios_database_and_a_resumed_one_goes_on_in_it(database: Any, tell: Tell) -> None:
    await asyncio.to_thread(tell, "trackio")
    (run,) = database.get_runs("agents")
    settings = database.get_run_config("agents", run)
    assert (settings["model"], settings["algorithm.name"], settings["trainer.steps"]) == ("tiny", "grpo", 8)
    assert settings["runner.k8s.env.PLACE"] == "[redacted]"
    (logged,) = [row for row in database.get_logs("agents", run) if "reward" in row]
    assert {name for name in logged if name != "timestamp"} == {"step", "reward", "reward/f1"}
    assert (logged["step"], logged["reward"]) == (3, 0.5)
    (alert,) = database.get_alerts("agents", run)
    assert (alert["title"], alert["text"], alert["level"], alert["step"]) == (
        "collapsed",
        "the reward collapsed",
        "warn",
        3,
    )
    (trace,) = database.get_traces("agents", run)
    assert trace["messages"] == [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    assert (trace["step"], trace["metadata"]["task"], trace["metadata"]["reward.f1"]) == (3, "task-1", 0.75)
    call, silent, tool = trace["spans"]
    assert (call["kind"], call["name"], call["usage"]) == (
        "generation",
        "writer",
        {"input_tokens": 3, "output_tokens": 2},
    )
    assert call["output"]["choices"][0]["message"]["content"] == "It is 4."
    assert (silent["input"], silent["output"]) == (None, None)
    assert (tool["kind"], tool["name"], tool["input"], tool["output"]) == ("tool", "add", {"a": 2}, "4")
    assert len({span["id"] for span in trace["spans"]}) == 3

    await asyncio.to_thread(tell, "trackio", step=4, steps=9)
    assert database.get_runs("agents") == [run]
    assert [row["step"] for row in database.get_logs("agents", run) if "reward" in row] == [3, 4]
    assert database.get_run_config("agents", run)["trainer.steps"] == 9
