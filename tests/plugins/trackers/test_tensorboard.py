"""What TensorBoard reads of a run."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from lightning.config import Config
from lightning.errors import MissingExtraError
from lightning.installation import install_command
from lightning.plugins import plugins
from lightning.tracking.trackers import names_of


def test_tensorboard_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    one = plugins().get("trackers", "tensorboard")(Config())
    one.start("a", {}, tmp_path)
    one.log(3, {"reward": 0.5, "broken": math.inf})
    one.close()
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    assert [(event.step, [(value.tag, value.simple_value) for value in event.summary.value]) for event in events] == [
        (3, [("reward", 0.5)])
    ]


def test_a_run_that_names_no_tracker_has_tensorboard() -> None:
    assert names_of(Config()) == ["jsonl", "tensorboard"]


def test_without_tensorboard_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    monkeypatch.delitem(sys.modules, "lightning_trackers.tensorboard", raising=False)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("tensorboard"))):
        plugins().get("trackers", "tensorboard")(Config()).start("a", {}, tmp_path)
