"""`lightning replay`, its fixture, and a program of another language that is answered from the record."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.errors import ConfigError, DataError
from lightning.store.url import sqlite_url
from lightning.testing import replayed as replayed
from lightning.testing import rollout
from lightning.types import Task

from tests.plugins.branching.conftest import store_record

LIGHTNING = [sys.executable, "-m", "lightning"]
ROLLOUT = "contract-0"

NODE = """
const headers = {"content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}`};
async function ask(content) {
  const body = JSON.stringify({model: "policy", messages: [{role: "user", content}]});
  const reply = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {method: "POST", headers, body});
  return (await reply.json()).choices[0].message.content;
}
console.log(await ask("And then? " + await ask("Do a task")));
"""


def lightning(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [*LIGHTNING, *arguments], capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def test_the_command_says_same_or_not(agents: Path) -> None:
    ran = lightning("replay", ROLLOUT, "two_turns:agent")
    assert ran.returncode == 0, ran.stderr
    assert "2 of 2 recorded calls were asked for and answered; 0 calls of a model" in ran.stdout
    assert "the replay is the recorded rollout" in ran.stdout
    ran = lightning("replay", ROLLOUT, "two_turns:changed", "--runs", "runs/one")
    assert ran.returncode == 1
    assert "The nearest is call 2 (agent/ask); they differ first at messages[0].content" in ran.stdout
    ran = lightning("replay", ROLLOUT, "two_turns:changed", "--until", "1")
    assert ran.returncode == 0, ran.stdout
    assert lightning("replay", ROLLOUT, "two_turns:changed", "--until", "0").returncode == 2


def test_what_cannot_be_replayed_is_said(agents: Path) -> None:
    for arguments, said in {
        ("nothing", "two_turns:agent"): "there is no rollout 'nothing' in runs",
        (ROLLOUT,): "give the agent as MODULE:FUNCTION, or --serve",
        (ROLLOUT, "two_turns:agent", "--port", "9"): "--port and --seconds are for --serve",
        (ROLLOUT, "two_turns:agent", "--model", "m"): "--model is for --train",
        (ROLLOUT, "two_turns:agent", "--attempt", "7"): "has 1 attempt, so there is no attempt 7",
    }.items():
        ran = lightning("replay", *arguments)
        assert ran.returncode == 2
        assert said in " ".join(ran.stderr.split())


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_program_of_another_language_is_answered(agents: Path) -> None:
    (agents / "agent.mjs").write_text(NODE)
    command = [*LIGHTNING, "replay", ROLLOUT, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as server:
        assert server.stdout is not None
        try:
            said = "".join(server.stdout.readline() for _ in range(4))
            variables = dict(re.findall(r"(OPENAI_\w+)=(\S+)", said))
            node = subprocess.run(
                ["node", "agent.mjs"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                env={**os.environ, **variables},
            )
            assert node.stdout == "second\n", node.stderr
            assert server.wait(60) == 0
            assert "the replay is the recorded rollout" in server.stdout.read()
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGKILL)


def test_the_fixture_is_a_regression_test_of_an_agent(agents: Path, replayed) -> None:  # type: ignore[no-untyped-def]
    import two_turns  # type: ignore[import-not-found]

    result = replayed(ROLLOUT, two_turns.agent, runs="runs")
    assert result.outcome.reward == 6.0
    with pytest.raises(AssertionError, match="the replay is another rollout"):
        replayed(ROLLOUT, two_turns.changed, runs="runs")
    assert not replayed(ROLLOUT, two_turns.changed, runs="runs", same=False).same
    with pytest.raises(ConfigError, match="there is no rollout"):
        replayed("nothing", two_turns.agent, runs="runs")


def test_a_rollout_from_before_requests_were_recorded_is_refused(agents: Path, replayed) -> None:  # type: ignore[no-untyped-def]
    import two_turns  # type: ignore[import-not-found]

    record = rollout(two_turns.agent, Task("a task"), ["first", "second"], adapters=("raw",))
    bare = replace(record, transitions=tuple(replace(call, extras={}) for call in record.transitions))
    asyncio.run(store_record(sqlite_url(agents / "old.db"), bare, 6.0))
    with pytest.raises(DataError, match=r"cannot be replayed: requests were not recorded"):
        replayed(ROLLOUT, two_turns.agent, runs="old.db")
