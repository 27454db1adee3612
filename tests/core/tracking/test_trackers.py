"""Metrics reach every tracker; one that fails or hangs neither stops nor delays the run."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import pytest
from lightning.config import Config
from lightning.errors import MissingExtraError, PluginError
from lightning.plugins import Plugins, plugins
from lightning.store.memory import MemoryStore
from lightning.tracking import Trackers, trackers
from lightning.tracking.jsonl import JsonLines
from lightning.tracking.tensorboard import TensorBoard

TRACKER = """
from lightning import hookimpl
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


def test_every_value_reaches_the_tracker_in_order(tracker, tmp_path: Path) -> None:
    module = tracker("mine")
    with Trackers(["mine", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        for step in range(50):
            run.log(step, {"reward": step / 2})
    logs = [("log", step, {"reward": step / 2}) for step in range(50)]
    assert module.calls == [("start", "a"), *logs, ("close",)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50


@pytest.mark.parametrize("broken", [{"start": "1 / 0"}, {"log": "1 / 0"}, {"start": "raise MissingExtraError('x')"}])
def test_one_that_fails_is_named_and_left_out(tracker, tmp_path: Path, warnings_of, broken: dict[str, str]) -> None:
    tracker("broken", **broken)
    with Trackers(["broken", "jsonl"], Config(), run="a", folder=tmp_path, store=MemoryStore()) as run:
        run.log(0, {"reward": 0.5})
        run.log(1, {"reward": 0.6})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert len([line for line in warnings_of() if "the tracker 'broken' failed and is left out" in line]) == 1


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


def test_tensorboard_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    one = plugins().tracker("tensorboard")(Config())
    one.start("a", {}, tmp_path)
    one.log(3, {"reward": 0.5, "broken": math.inf})
    one.close()
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    assert [(event.step, [(value.tag, value.simple_value) for value in event.summary.value]) for event in events] == [
        (3, [("reward", 0.5)])
    ]


def test_without_tensorboard_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning\[tensorboard\]<1'"):
        TensorBoard().start("a", {}, tmp_path)
