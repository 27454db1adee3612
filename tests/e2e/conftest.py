"""A small real run of the demo in its own process, to be disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from lightning.plugins import plugins
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Status, StepRecord


@dataclass
class DemoRun:
    """A run of `lightning demo tiny` with few, small steps, or of another command that takes the same options."""

    folder: Path
    steps: int = 3
    command: Sequence[str] = ("demo", "tiny", "--no-pages", "--held-out", "8")
    process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        command = [
            sys.executable, "-m", "lightning", *self.command, "--out", str(self.folder),
            "--set", f"trainer.steps={self.steps}", "--set", "trainer.tasks_per_step=4",
            "--set", "runner.concurrency=8", *more,
        ]  # fmt: skip
        with (self.folder.parent / "output.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def output(self) -> str:
        file = self.folder.parent / "output.txt"
        return file.read_text() if file.exists() else ""

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=400)

    def until(self, what: Callable[[DemoRun], bool], seconds: float = 400) -> None:
        """Wait until something is true of the run; fail with its output when it ends or takes too long."""
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not what(self):
            assert self.process.poll() is None, f"the run ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {seconds} s:\n{self.output}"
            time.sleep(0.2)

    def committed(self) -> list[StepRecord]:
        return asyncio.run(self._read())[0]

    def rollouts(self) -> list[Rollout]:
        return asyncio.run(self._read())[1]

    async def _read(self) -> tuple[list[StepRecord], list[Rollout]]:
        database = self.folder / "lightning.db"
        if not database.exists():
            return [], []
        store = plugins().store(f"sqlite:///{database}")
        await store.open()
        try:
            return await store.steps(self.folder.name), await all_rollouts(store, self.folder.name)
        finally:
            await store.close()

    def descendants(self, word: str) -> list[psutil.Process]:
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if word in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    def report(self) -> dict[str, object]:
        return dict(json.loads((self.folder / "report.json").read_text()))

    def audit(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lightning", "audit", str(self.folder)], capture_output=True, text=True, timeout=120
        )

    def assert_whole(self) -> None:
        """All steps are there once, every trained rollout is in exactly one of them, and the audit finds nothing."""
        steps = self.committed()
        assert [record.step for record in steps] == list(range(1, self.steps + 1))
        trained = Counter(name for record in steps for name, _ in record.rollouts)
        assert trained, "something was trained"
        assert set(trained.values()) == {1}
        assert self.report()["drift_tokens"] == 0
        audited = self.audit()
        assert audited.returncode == 0, audited.stdout


def in_the_middle_of_step(step: int) -> Callable[[DemoRun], bool]:
    """True while some rollouts of a step have ended and others have not."""

    def check(run: DemoRun) -> bool:
        mine = [rollout for rollout in run.rollouts() if rollout.split == "train" and rollout.step == step]
        done = [rollout for rollout in mine if rollout.status is Status.SUCCEEDED]
        return 0 < len(done) < len(mine)

    return check


@pytest.fixture
def demo_run(tmp_path: Path, interruptible: None) -> Iterator[DemoRun]:
    run = DemoRun(tmp_path / "demo")
    yield run
    if run.process is not None and run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


@pytest.fixture
def middle() -> Callable[[int], Callable[[DemoRun], bool]]:
    return in_the_middle_of_step
