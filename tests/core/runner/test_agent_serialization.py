"""How agents travel, and scripts that are not executed twice; nothing outlives the trainer."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.runner import agent_serialization
from lightning.types import LLM, Task

SCRIPT = """
import asyncio, os, sys
from lightning.config import RunnerConfig
from lightning.runner.process import ProcessRunner
from lightning.types import LLM, Lease, Rollout, Task
import helper_beside_the_script

print("the script runs", flush=True)
FACTOR = 0.5

class Grader:
    def grade(self, value):
        return helper_beside_the_script.half(value) * FACTOR

def agent(task, llm):
    print("the agent runs", flush=True)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert sys.stdin.read() == ""
    return Grader().grade(task.input)

async def main():
    runner = ProcessRunner(agent, RunnerConfig(concurrency=2))
    await runner.start()
    leases = [Lease(Rollout(f"r{i}", "run", Task(8.0 * i), "g"), "w", 0.0) for i in range(3)]
    outcomes = await asyncio.gather(*(runner.run(lease, LLM("http://127.0.0.1:1/v1", "k", "m")) for lease in leases))
    print([outcome.reward for outcome in outcomes], [outcome.error for outcome in outcomes], flush=True)
    await runner.close()

asyncio.run(main())
"""

VICTIM = """
import asyncio, os, sys, time
from lightning.config import RunnerConfig
from lightning.runner.process import ProcessRunner
from lightning.types import LLM, Lease, Rollout, Task

def agent(task, llm):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getppid(), os.getpid(), child.pid, flush=True)
    time.sleep(600)

async def main():
    runner = ProcessRunner(agent, RunnerConfig(concurrency=1))
    await runner.start()
    await runner.run(Lease(Rollout("r", "run", Task(1), "g"), "w", 0.0), LLM("http://127.0.0.1:1/v1", "k", "m"))

asyncio.run(main())
"""


def test_a_script_without_a_main_guard_is_executed_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "helper_beside_the_script.py").write_text("def half(value):\n    return value / 2\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd="/",
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("the script runs") == 1
    assert done.stdout.count("the agent runs") == 3, "two may share a line"
    assert lines[-1] == "[0.0, 2.0, 4.0] ['', '', '']"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_trainer(how: signal.Signals, gone: Callable[[int], bool], tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(textwrap.dedent(VICTIM))
    trainer = subprocess.Popen([sys.executable, str(tmp_path / "victim.py")], stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 3
        trainer.send_signal(how)
        assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_everything(gone: Callable[[int], bool], tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(textwrap.dedent(VICTIM))
    trainer = subprocess.Popen(
        [sys.executable, str(tmp_path / "victim.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 3
        os.killpg(trainer.pid, signal.SIGINT)
        assert all(gone(pid) for pid in pids)
        assert trainer.wait(120) != 0


def add(task: Task, llm: LLM, bonus: float = 0.0) -> float:
    return 1.0 + bonus


def test_names_and_modules() -> None:
    assert agent_serialization.name_of(functools.partial(add, bonus=1.0)).endswith("partial")
    assert agent_serialization.name_of(add) == f"{__name__}.add"


def test_what_a_new_process_can_import_travels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "WEIGHT = 'a text that would show up'\ndef agent(task, llm):\n    return len(WEIGHT)\n"
    (tmp_path / "an_importable_agent.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("an_importable_agent")
    assert b"would show up" not in agent_serialization.pack_agent(module.agent)
    monkeypatch.undo()  # now it cannot be found by name any more
    shipped = agent_serialization.pack_agent(functools.partial(module.agent))
    assert b"would show up" in shipped
    del sys.modules["an_importable_agent"]
    assert agent_serialization.unpack_agent(shipped)(Task(1), LLM("", "", "")) == len("a text that would show up")


def test_all_that_a_new_process_could_not_import_travels_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_lost_agent.py").write_text(
        "from a_lost_helper import Grader\nimport a_lost_module\n"
        "def agent(task, llm):\n    return Grader().grade(task.input) + a_lost_module.BONUS\n"
    )
    (tmp_path / "a_lost_helper.py").write_text(
        "import a_lost_depth\nclass Grader:\n    def grade(self, value):\n        return a_lost_depth.half(value)\n"
    )
    (tmp_path / "a_lost_depth.py").write_text("def half(value):\n    return value / 2\n")
    (tmp_path / "a_lost_module.py").write_text("BONUS = 0.25\n")
    names = ["a_lost_agent", "a_lost_helper", "a_lost_depth", "a_lost_module"]
    with monkeypatch.context() as importable:
        importable.syspath_prepend(str(tmp_path))
        agent = __import__("a_lost_agent").agent
    try:
        shipped = agent_serialization.pack_agent(lambda task, llm: agent(task, llm))
    finally:
        for name in names:
            del sys.modules[name]
    assert agent_serialization.unpack_agent(shipped)(Task(3.0), LLM("", "", "")) == 1.75
    assert not set(names) & sys.modules.keys()
