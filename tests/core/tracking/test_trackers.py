"""Metrics reach every tracker; one that fails or hangs neither stops nor delays the run."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, with_settings
from lightning.errors import PluginError
from lightning.plugins import Plugins
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.tracking import trackers
from lightning.tracking.jsonl import JsonLines
from lightning.tracking.protocol import AttemptRecord
from lightning.tracking.trackers import Trackers, names_of
from lightning.types import Rollout, Run, Task

TRACKER = """
from lightning import hookimpl
from lightning.errors import MissingExtraError
calls = []

class Tracker:
    def start(self, run, config, folder): calls.append(("start", run)); {start}
    def log(self, step, values): calls.append(("log", step, values)); {log}
    def close(self): calls.append(("close",))

@hookimpl
def register_trackers(register): register({name!r}, lambda config: Tracker())
"""


@pytest.fixture
def tracker(install, monkeypatch: pytest.MonkeyPatch):
    """Install a tracker of a stranger: `tracker("name", log="1 / 0")` gives its module."""

    def make(name: str, start: str = "pass", log: str = "pass"):
        module = f"{name}_tracker"
        install(name, {name: module}, {module: TRACKER.format(name=name, start=start, log=log)})
        fresh = Plugins()
        monkeypatch.setattr(trackers, "plugins", lambda: fresh)
        fresh.plugins()
        return sys.modules[module]

    return make


def test_a_run_that_names_no_tracker_has_the_usual_ones(tracker, install, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker("mine")
    assert {"jsonl"} <= set(names_of(Config())) <= {"jsonl", "tensorboard"}, (
        "a tracker is asked for, unless it says otherwise"
    )
    code = TRACKER.format(name="theirs", start="pass", log="pass").replace("Tracker())", "Tracker(), usual=True)")
    install("theirs", {"theirs": "theirs_tracker"}, {"theirs_tracker": code})
    monkeypatch.setattr(trackers, "plugins", Plugins)
    assert "theirs" in names_of(Config())
    for named in ((), ("jsonl",), ("mine", "jsonl")):
        assert names_of(with_settings(Config(), {"trainer.trackers": named})) == named


def test_every_value_reaches_the_tracker_in_order(tracker, tmp_path: Path) -> None:
    module = tracker("mine")
    with Trackers(["mine", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        for step in range(50):
            run.log(step, {"reward": step / 2})
    logs = [("log", step, {"reward": step / 2}) for step in range(50)]
    assert module.calls == [("start", "a"), *logs, ("close",)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50


@pytest.mark.parametrize("broken", [{"start": "1 / 0"}, {"start": "raise MissingExtraError('x')"}])
def test_one_that_cannot_start_is_named_and_left_out(
    tracker, tmp_path: Path, warnings_of, broken: dict[str, str]
) -> None:
    tracker("broken", **broken)
    config = with_settings(Config(), {"trainer.trackers": ("broken", "jsonl")})
    with Trackers(["broken", "jsonl"], config, run="a", folder=tmp_path, store=MemoryStore()) as run:
        run.log(0, {"reward": 0.5})
        run.log(1, {"reward": 0.6})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert len([line for line in warnings_of() if "the tracker 'broken' failed and is left out" in line]) == 1


def test_a_usual_one_whose_library_is_missing_is_no_warning(tracker, tmp_path: Path, warnings_of) -> None:
    tracker("usual", start="raise MissingExtraError('x')")
    with Trackers(["usual", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        run.log(0, {"reward": 0.5})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert warnings_of() == []


def test_a_call_that_fails_costs_that_call_alone(tracker, tmp_path: Path, warnings_of) -> None:
    module = tracker("flaky", log="1 / (step not in (3, 4))")
    with Trackers(["flaky"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        for step in range(6):
            run.log(step, {"reward": 0.5})
    assert [call[1] for call in module.calls if call[0] == "log"] == [0, 1, 2, 3, 4, 5]
    assert module.calls[-1] == ("close",)
    assert [line.rpartition(": ")[0] for line in warnings_of() if "'flaky'" in line] == [
        "the tracker 'flaky' failed (1 so far) and goes on",
        "the tracker 'flaky' failed (2 so far) and goes on",
        "the tracker 'flaky' failed 2 times in all",
    ]


def test_one_that_always_fails_is_named_at_growing_distances(tracker, tmp_path: Path, warnings_of) -> None:
    tracker("broken", log="1 / 0")
    with Trackers(["broken", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        for step in range(100):
            run.log(step, {"reward": 0.5})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
    warned = [line for line in warnings_of() if "'broken'" in line]
    assert [line.partition("(")[2].split()[0] for line in warned[:-1]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert "failed 100 times in all" in warned[-1]


async def test_an_attempt_that_is_not_taken_costs_that_attempt_alone(
    tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tracker("flaky")

    async def attempt(self: Any, record: AttemptRecord, store: Store) -> None:
        module.calls.append(record.rollout.id)
        if record.rollout.id == "first":
            raise OSError("the backend is down")

    monkeypatch.setattr(module.Tracker, "attempt", attempt, raising=False)
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("a", "a"))
    await store.create_rollouts([Rollout(name, "a", Task("q"), "g") for name in ("first", "second")])
    rollouts = [lease.rollout for lease in await store.lease("a", "worker", limit=2)]

    def told() -> None:
        with Trackers(["flaky"], Config(), run="a", folder=tmp_path, store=store) as run:
            for rollout in rollouts:
                run.finished(rollout)

    await asyncio.to_thread(told)
    await store.close()
    assert [call for call in module.calls if isinstance(call, str)] == ["first", "second"]


def test_alarms_reach_those_that_have_a_place_for_them(
    tracker, tmp_path: Path, warnings_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tracker("mine")
    monkeypatch.setattr(module.Tracker, "alert", lambda self, alert: module.calls.append(alert), raising=False)
    with Trackers(["mine", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        run.alert({"cause": "collapsed"})
        run.log(0, {"reward": 0.5})
    assert module.calls == [("start", "a"), {"cause": "collapsed"}, ("log", 0, {"reward": 0.5}), ("close",)]
    assert warnings_of() == []


def test_settings_are_told_without_credentials(tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tracker("mine")
    monkeypatch.setattr(module.Tracker, "start", lambda self, run, config, folder: module.calls.append(config))
    config = with_settings(Config(), {"runner.k8s.env": {"PLACE": "sk-" + "a1B2" * 10, "API_KEY": "plain"}})
    with Trackers(["mine"], config, run="a", folder=tmp_path, store=MemoryStore(), about={"model": "tiny"}):
        pass
    said = module.calls[0]
    assert (said["model"], said["trainer"]["steps"]) == ("tiny", Config().trainer.steps)
    assert said["runner"]["k8s"]["env"] == {"PLACE": "[redacted]", "API_KEY": "[redacted]"}


async def test_one_that_is_behind_at_the_end_is_told_the_metrics_and_no_more_rollouts(
    tracker, tmp_path: Path, warnings_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1.0)
    module = tracker("slow")

    async def attempt(self: Any, record: AttemptRecord, store: Store) -> None:
        time.sleep(0.1)

    monkeypatch.setattr(module.Tracker, "attempt", attempt, raising=False)
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("a", "a"))
    await store.create_rollouts([Rollout(str(number), "a", Task("q"), "g") for number in range(40)])
    rollouts = [lease.rollout for lease in await store.lease("a", "worker", limit=40)]

    def told() -> None:
        with Trackers(["slow"], Config(), run="a", folder=tmp_path, store=store) as run:
            for rollout in rollouts:
                run.finished(rollout)
            run.log(0, {"reward": 0.5})

    await asyncio.to_thread(told)
    while module.calls[-1] != ("close",):
        await asyncio.sleep(0.01)
    await store.close()
    assert ("log", 0, {"reward": 0.5}) in module.calls
    assert any("was too slow: it was not told of" in line for line in warnings_of())
    assert not any("failed" in line for line in warnings_of())


def test_one_that_hangs_does_not_keep_the_run(tracker, tmp_path: Path, warnings_of, monkeypatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
    module = tracker("stuck", log="import threading; threading.Event().wait(60)")
    with Trackers(["stuck", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        run.log(0, {"reward": 0.5})
        while len(module.calls) < 2:
            time.sleep(0.001)
    assert any("the tracker 'stuck' is not done" in line for line in warnings_of())


def test_an_unknown_tracker_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"there is no tracker 'jsonll'; did you mean 'jsonl'\?"):
        Trackers(["jsonll"], Config(), run="a", folder=tmp_path, store=MemoryStore())


def test_jsonl_appends_and_repairs_a_line_that_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "reward": 0.5}\n{"step": 1, "rew')
    one = JsonLines()
    one.start("a", {}, tmp_path)
    one.log(1, {"reward": math.nan, "loss": 0.25})
    rows = [json.loads(line) for line in file.read_text().splitlines()]  # before close: readers see it at once
    one.close()
    assert [row["step"] for row in rows] == [0, 1]
    assert (rows[1]["reward"], rows[1]["loss"]) == (None, 0.25)
