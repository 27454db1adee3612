"""A step of a small model's engine waits for more requests only where many may come, and only while the cores are busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lightning.policy_server.gathering import AT_ONCE, LONGEST, PAUSE, Gathering

CORES = 4


class Machine:
    """Its file says how many tasks run; its clock goes on by what is slept."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.slept, self._turns = file, 0.0, 0
        self.says(1)
        monkeypatch.setattr("os.cpu_count", lambda: CORES)
        monkeypatch.setattr("time.monotonic", lambda: self.slept)
        monkeypatch.setattr("time.sleep", self._sleep)

    def says(self, running: int, turns: int | None = None) -> None:
        """So many tasks run, and one alone after so many pauses."""
        self.file.write_text(f"0.10 10.5 3.00 {running}/512 4711\n")
        self._turns = -1 if turns is None else turns

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        self._turns -= 1
        if self._turns == 0:
            self.says(1)

    def waited(self, running: int) -> float:
        """The seconds that a step with so many requests waits."""
        before, waits = self.slept, Gathering.of({AT_ONCE: "32"}, str(self.file))
        assert waits is not None
        waits.wait(running)
        os.close(waits.load)
        return self.slept - before


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "loadavg", monkeypatch)


def test_a_step_waits_while_others_could_use_every_core_and_no_longer(machine: Machine) -> None:
    assert machine.waited(1) == 0.0
    machine.says(CORES)  # this thread is one of them
    assert machine.waited(1) == 0.0
    machine.says(CORES + 1, turns=2)
    assert machine.waited(1) == pytest.approx(2 * PAUSE)
    machine.says(100)
    assert machine.waited(1) == pytest.approx(LONGEST, abs=PAUSE)


def test_a_step_with_half_of_all_requests_does_not_wait(machine: Machine) -> None:
    machine.says(100)
    assert machine.waited(16) == 0.0
    assert machine.waited(15) > 0.0


@pytest.mark.parametrize("asked", ["", "0", "15", "many", "-32"])
def test_no_step_waits_for_few_requests(tmp_path: Path, asked: str) -> None:
    (tmp_path / "loadavg").write_text("9 9 9 99/999 1\n")
    assert Gathering.of({AT_ONCE: asked}, str(tmp_path / "loadavg")) is None


def test_no_step_waits_where_nothing_says_how_busy_the_machine_is(tmp_path: Path) -> None:
    assert Gathering.of({}, str(tmp_path / "loadavg")) is None
    assert Gathering.of({AT_ONCE: "32"}, str(tmp_path / "absent")) is None


def test_this_machines_own_file_is_read() -> None:
    waits = Gathering.of({AT_ONCE: "32"})
    if waits is None:
        pytest.skip("no /proc/loadavg")
    found = [Gathering(32, cores, waits.load).busy() for cores in (0, 1 << 20)]
    os.close(waits.load)
    assert found == [True, False]
