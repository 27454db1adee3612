"""A local Ray that does not start at once."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.config.verl import VerlConfig
from lightning.engines.verl.device import choose
from lightning.errors import EngineError

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow  # what the group imports of verl takes seconds, although no Ray starts


@pytest.mark.parametrize("failures", [1, 2])
def test_ray_is_started_once_more(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("cpu")  # before verl is imported, by whichever test is the first to do so
    from lightning.engines.verl.group import connect

    asked: list[str] = []

    def init(**how: Any) -> None:
        asked.append("init")
        if asked.count("init") <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shutdown"))
    if failures == 1:
        assert connect(VerlConfig(), "cpu")
    else:
        with pytest.raises(EngineError, match=r"did not start on this machine, twice: The current node timed out"):
            connect(VerlConfig(), "cpu")
    assert asked == ["init", "shutdown", "init"]
