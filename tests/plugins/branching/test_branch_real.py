"""Branches on a real vLLM: what they cost beside their parent, and the command with a server of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import with_store
from lightning.policy_server.auto_settings import BLOCK_TOKENS
from lightning.policy_server.protocol import Usage
from lightning.store.url import sqlite_url
from lightning.types import Transition
from lightning_record import exchanges

from tests.plugins.debug.evaluating import said

pytestmark = pytest.mark.slow

AGENT = """
import time
import httpx

LONG = "The tide comes and goes with the moon, twice a day in most places, and once a day in some. " * 4

def chat(llm, messages):
    body = {"model": llm.model, "messages": messages, "max_tokens": 12}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    if reply.is_error:
        raise RuntimeError(reply.json()["error"]["message"])
    return reply.json()["choices"][0]["message"]["content"]

def agent(task, llm, first=""):
    messages = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"{first}{turn}. {LONG}"})
        messages.append({"role": "assistant", "content": chat(llm, messages)})
    return float(len(messages[-1]["content"]))

def clocked(task, llm):
    return agent(task, llm, f"It is {time.time()}. ")
"""
SETTINGS = ["--set", "policy_server.device=cpu", "--set", "policy_server.dtype=float32"]
DETAILS = 'policy_server.args=["--enable-prompt-tokens-details"]'


class Shared:
    """The tests' vLLM as the policy server of a run. Its weights are the version 0 of everybody."""

    version, models, claim = 0, (), ""

    def __init__(self, real: Any) -> None:
        self.url, self.model = real.vllm.url, real.vllm.model
        self.alias = self.model

    async def start(self) -> None:
        return

    async def usage(self) -> Usage:
        return Usage()

    async def wait_died(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


@pytest.fixture
def shared(served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """In an empty folder with the module `talking`: every policy server is the tests' own."""
    (tmp_path / "talking.py").write_text(AGENT)
    (tmp_path / "one.jsonl").write_text(json.dumps({"input": "tides", "id": "t"}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("lightning.trainer.stack.make_policy_server", lambda *_, **__: Shared(served))
        yield patched
    sys.modules.pop("talking", None)


def record(model: Path, agent: str = "agent") -> str:
    """The id of a rollout of an agent."""
    command = ["eval", str(model), f"talking:{agent}", "--tasks", "one.jsonl", "-n", "1", "--out", f"runs/{agent}"]
    assert said([*command, "--runner", "inline", *SETTINGS]) == 0
    return f"{agent}/0/0/0"


def calls_of(rollout: str, run: str = "agent") -> list[Transition]:
    url = sqlite_url(Path(f"runs/{run}/lightning.db").resolve())
    return asyncio.run(with_store(url, lambda store: store.transitions(rollout)))


def computed(calls: Sequence[Transition], parent: str) -> list[int]:
    """The prompt tokens of each call of a branch that vLLM had to compute."""
    found = []
    for exchange in exchanges.read(calls, exchanges.Parent(parent, calls_of(parent))):
        assert exchange is not None
        usage: Any = exchange.reply["usage"]  # type: ignore[index]
        found.append(usage["prompt_tokens"] - (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])
    return found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def stored(calls: Sequence[Transition]) -> int:
    """The bytes of what was said."""
    return sum(len(exchanges.packed_in(call) or b"") for call in calls)


def test_a_branch_costs_its_own_calls(shared: Any, real_vllm: Any, capsys: Any) -> None:
    """vLLM computes of a live call's prompt what nobody has sent before, and less than a block more."""
    parent = record(real_vllm.first)
    theirs = calls_of(parent)
    assert len(theirs) == 4
    assert sum(len(call.prompt_ids) for call in theirs[:2]) > 8 * BLOCK_TOKENS, "or it would show nothing"
    assert said(["branch", parent, "talking:agent", "--at", "3", "-n", "8", "--runner", "inline"]) == 0
    for number in range(8):
        own = calls_of(f"agent.0.0.0-call3/0/{number}")
        assert len(own) == 2
        assert list(own[0].prompt_ids) == list(theirs[2].prompt_ids)
        before = [*own[0].prompt_ids, *own[0].response_ids]
        new = [0, len(own[1].prompt_ids) - common(own[1].prompt_ids, before)]
        for call, tokens, cost in zip(own, new, computed(own, parent), strict=True):
            assert cost <= tokens + BLOCK_TOKENS, (number, call.seq, cost, tokens)
        assert stored(own) <= stored(theirs[2:])
    assert (
        said(["branch", parent, "talking:agent", "--at", "2", "-n", "2", "--runner", "inline", "--edit", "Ebb."]) == 0
    )
    edited = calls_of("agent.0.0.0-call2/0/0")
    assert len(edited) == 2
    request: Any = exchanges.read(edited, exchanges.Parent(parent, theirs))[0]
    assert request.request["messages"][3] == {"role": "assistant", "content": "Ebb."}
    clocked = record(real_vllm.first, "clocked")
    capsys.readouterr()
    assert said(["branch", clocked, "talking:clocked", "--at", "2", "-n", "2", "--runner", "inline"]) == 1
    assert "Suspect: the clock" in " ".join(capsys.readouterr().out.split())


def test_the_command_with_a_vllm_of_its_own(shared: Any, real_vllm: Any, capsys: Any) -> None:
    """Cold, it computes the prefix once, however many branches there are."""
    parent = record(real_vllm.first)
    theirs = calls_of(parent)
    shared.undo()
    capsys.readouterr()
    command = ["branch", parent, "talking:agent", "--at", "3", "-n", "4", "--set", "temperature=0.5", "--set", DETAILS]
    assert said(command) == 0
    assert "4 branches of agent/0/0/0 at call 3 of 4" in " ".join(capsys.readouterr().out.split())
    own = [calls_of(f"agent.0.0.0-call3/0/{number}") for number in range(4)]
    for calls in own:
        assert list(calls[0].prompt_ids) == list(theirs[2].prompt_ids)
        assert {call.temperature for call in calls} == {0.5}
    costs = [computed(calls, parent)[0] for calls in own]
    assert sum(costs) <= len(theirs[2].prompt_ids) + 4 * BLOCK_TOKENS
