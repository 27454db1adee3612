"""`kill -9` of any process in the middle of a run: nothing acknowledged is lost, no rollout is trained twice."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from lightning.types import Rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Middle = Callable[[int], Callable[[Any], bool]]


def test_killing_the_trainer_then_interrupting_it_and_resuming_each_time(demo_run: Any, middle: Middle) -> None:
    demo_run.start()
    demo_run.until(middle(2))
    children = demo_run.descendants("")
    os.kill(demo_run.process.pid, signal.SIGKILL)
    demo_run.wait()
    before = ended(demo_run)
    committed = demo_run.committed()
    assert committed
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, "a killed trainer leaves no vLLM and no agent behind"

    demo_run.start("--resume")
    demo_run.until(middle(3))
    children = demo_run.descendants("")
    demo_run.process.send_signal(signal.SIGINT)
    assert demo_run.wait() == 130, demo_run.output
    assert "stopped; nothing that was recorded is lost. Go on with:" in demo_run.output
    assert "Traceback" not in demo_run.output
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    assert_kept(demo_run, before)
    before = ended(demo_run)

    demo_run.start(
        "--resume", "--set", "engine.tokens_per_microbatch=512", "--set", "engine.gradient_checkpointing=true"
    )
    assert demo_run.wait() == 0, demo_run.output
    assert "config epoch 1 begins with step" in demo_run.output
    assert "engine.tokens_per_microbatch" in demo_run.output
    assert_kept(demo_run, before)
    assert demo_run.committed()[: len(committed)] == committed
    demo_run.assert_whole()


def ended(run: Any) -> dict[str, Rollout]:
    """The rollouts that have their reward."""
    return {rollout.id: rollout for rollout in run.rollouts() if rollout.reward is not None}


def assert_kept(run: Any, before: dict[str, Rollout]) -> None:
    """What had ended before is as it was, and was not run again."""
    assert before
    after = {rollout.id: rollout for rollout in run.rollouts()}
    for name, rollout in before.items():
        assert after[name].reward == rollout.reward
        assert after[name].attempt == rollout.attempt, "a finished rollout is not run again"


def kill_an_agent(run: Any) -> bool:
    """Whether one was killed: each lives for one rollout, and may end before the signal comes."""
    assert run.process.poll() is None, run.output
    processes = {child.pid: child for child in run.descendants("lightning.runner.forkserver_main")}
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() in processes:
                process.kill()
                return True
    return False


def test_killing_agents_then_vllm(demo_run: Any, middle: Middle) -> None:
    demo_run.steps = 2
    demo_run.start()
    demo_run.until(middle(1))
    killed = 0
    while killed < 3:
        killed += kill_an_agent(demo_run)
        time.sleep(0.1)
    demo_run.until(middle(2))
    assert "restarting" not in demo_run.output
    servers = demo_run.descendants("lightning.policy_server.launch")
    assert servers
    for server in servers:
        server.kill()
    assert demo_run.wait() == 0, demo_run.output
    assert "restarting" in demo_run.output
    demo_run.assert_whole()
