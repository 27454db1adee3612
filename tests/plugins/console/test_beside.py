"""The console beside a training, as `lightning demo --console` has it: whatever becomes of it, the training is the same."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from lightning.cli import demo
from lightning.types import Task

from tests.core.trainer.conftest import STEPS, agent, open_bench
from tests.plugins.console.test_server import ask

HANGS = """
import pathlib, signal, sqlite3, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
database = pathlib.Path(sys.argv[1]) / "lightning.db"
while not database.exists() or not database.stat().st_size:
    time.sleep(0.02)
reading = sqlite3.connect(database, isolation_level=None)
reading.execute("BEGIN")
reading.execute("SELECT count(*) FROM sqlite_schema").fetchall()
print("reading", flush=True)
time.sleep(120)
"""
"""A console that hangs in the middle of a read, and does not end when it is told to."""
MIDDLE = 12
"""Rollouts after which something happens to the console: in the second step."""


async def trained(folder: Path, during: Callable[[], Awaitable[None]] | None = None) -> tuple[list[str], list[str]]:
    """Train; returns the digests of the steps and the weights. Rollouts run one after the other, so that they are the same."""
    begun = 0

    async def disturbed(task: Task, llm: Any) -> float:
        nonlocal begun
        begun += 1
        if begun == MIDDLE and during is not None:
            await during()
        return await agent(task, llm)

    async with open_bench(folder, disturbed, runner__concurrency=1) as bench:
        await bench.loop.run({})
        steps = await bench.store.steps("run")
        assert [step.step for step in steps] == list(range(1, STEPS + 1))
        assert begun > MIDDLE
        return [step.digest for step in steps], bench.policy.ledger


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The consoles that were started, whose output is read here."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(line: list[str]) -> subprocess.Popen[bytes]:
        processes.append(start(line, stdout=subprocess.PIPE))
        return processes[-1]

    monkeypatch.setattr(demo.subprocess, "Popen", popen)
    monkeypatch.setenv("BROWSER", "true")
    return processes


@pytest.mark.slow
async def test_a_training_whose_console_is_killed_trains_the_same(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async def look_and_kill() -> None:
        (console,) = started
        assert console.stdout is not None
        line = (await asyncio.to_thread(console.stdout.readline)).decode()
        found = re.search(r"http://127\.0\.0\.1:\d+/console/\?token=\S+", line)
        assert found, line
        url = found.group(0)
        async with httpx.AsyncClient(timeout=60, follow_redirects=True) as client:
            assert (await client.get(url.partition("?")[0])).status_code == 401, "nothing without the token"
            assert (await client.get(url, headers={"host": "evil.example:80"})).status_code == 421, "DNS rebinding"
            assert "gradio_config" in (await client.get(url)).text
            shown = (await ask(client, url.partition("/?")[0], "show", address="run/run", seen="")).json()
            assert shown["live"]
            assert "running" in str(shown["page"]["blocks"][0])
        console.kill()
        await asyncio.to_thread(console.wait)

    alone = await trained(tmp_path / "alone")
    with demo._console(tmp_path / "beside"):
        beside = await trained(tmp_path / "beside", look_and_kill)
    assert beside == alone
    assert "the console ended before the training did, with exit code -9" in caplog.text
    assert started[0].stdout is not None
    started[0].stdout.close()


async def test_a_training_whose_console_hangs_in_the_middle_of_a_read_trains_the_same_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, hanging = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def popen(line: list[str]) -> subprocess.Popen[bytes]:
        hanging.append(start([sys.executable, "-c", HANGS, line[-1]], stdout=subprocess.PIPE))
        return hanging[-1]

    async def until_it_reads() -> None:
        assert hanging[0].stdout is not None
        assert await asyncio.to_thread(hanging[0].stdout.readline) == b"reading\n"

    monkeypatch.setattr(demo.subprocess, "Popen", popen)
    monkeypatch.setattr(demo, "END_SECONDS", 0.3)
    alone = await trained(tmp_path / "alone")
    with demo._console(tmp_path / "beside"):
        beside = await trained(tmp_path / "beside", until_it_reads)
    assert beside == alone
    assert hanging[0].returncode == -signal.SIGKILL, "it does not hear of the end, and is ended all the same"
    assert "the console ended" not in caplog.text
    assert hanging[0].stdout is not None
    hanging[0].stdout.close()
