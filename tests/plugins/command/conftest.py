"""What the tests of programs share: none may leave a process or a folder behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders of rollouts are made; empty again after each test, and no program that was started in it still runs."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    yield place
    until = time.monotonic() + 10
    while (left := [*place.iterdir(), *inside(place)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def inside(place: Path) -> list[psutil.Process]:
    """The processes whose folder is in a place."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        if str(process.info["cwd"] or "").startswith(str(place)):
            found.append(process)
    return found
