"""What the tests of `eval` and `ab` share: an agent with a prompt, on a vLLM whose script decides who succeeds."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.app import main
from lightning.policy_server.protocol import Usage
from lightning.testing.fake_vllm import FakeVLLM, Reply

AGENT = """
import asyncio
import httpx
import lightning

writer = lightning.component("writer", prompt="Answer {question}")

async def ask(llm, content):
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(headers=headers, verify=False) as client:
        reply = await client.post(f"{llm.base_url}/chat/completions", json=body)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]

async def agent(task, llm):
    with writer:
        said = await ask(llm, writer.prompt.format(question=task.input))
    return float("yes" in said)

async def graded(task, llm):
    with writer:
        said = await ask(llm, writer.prompt.format(question=task.input))
    return float(said)

async def deaf(task, llm):
    return float("yes" in await ask(llm, str(task.input)))

async def broken(task, llm):
    raise ValueError("no such tool")
"""
FIXED = ["--runner", "inline", "--set", "policy_server.dtype=float32", "--set", "engine.dtype=float32"]


class ScriptedVLLM:
    """A policy server whose answers `script` decides; `models` are the folders that were served, in order."""

    def __init__(self) -> None:
        self.models: list[Path] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.servers: list[_Server] = []
        self.restarts = 0
        self.loading = 0.0
        """Seconds for which a restarted server answers at its new address, and has no weights yet."""
        self.untrained = 0
        """Calls that a server without its weights answered."""
        self.answer: Callable[[Mapping[str, Any], Path], Reply | str] = lambda body, model: "yes"

    def make(self, model: Path, *_: Any, **__: Any) -> _Server:
        self.servers.append(_Server(self, model))
        return self.servers[-1]

    def die(self) -> None:
        """The server that was made last dies; it is started again at another address."""
        self.servers[-1].died.set()


class _Server:
    version = 0
    models, claim = (), ""

    def __init__(self, scripted: ScriptedVLLM, model: Path) -> None:
        self._scripted, self._model, self._loaded = scripted, model, True
        self.fake = FakeVLLM(script=self._script)
        self.died = asyncio.Event()

    def _script(self, body: Mapping[str, Any]) -> Reply:
        self._scripted.bodies.append(body)
        self._scripted.untrained += not self._loaded
        said = self._scripted.answer(body, self._model)
        return said if isinstance(said, Reply) else Reply(said)

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def model(self) -> str:
        return self.fake.model

    alias = model

    async def start(self) -> None:
        self._scripted.models.append(self._model)
        await self.fake.start()

    async def usage(self) -> Usage:
        return Usage()

    async def wait_died(self) -> None:
        await self.died.wait()

    async def restart(self, weights: Path | None, version: int) -> None:
        self.died.clear()
        self._scripted.restarts += 1
        await self.fake.close()
        self.fake = FakeVLLM(script=self._script)
        self._loaded = False
        await self.fake.start()
        await asyncio.sleep(self._scripted.loading)
        self._loaded = True

    async def close(self) -> None:
        await self.fake.close()


def asked(body: Mapping[str, Any]) -> str:
    """What the agent has asked."""
    return str(body["messages"][-1]["content"])


def said(arguments: list[str]) -> int:
    """The exit code of a command."""
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def write_tasks(file: Path, count: int) -> Path:
    file.write_text(
        "".join(json.dumps({"input": f"question {number}", "id": f"t{number}"}) + "\n" for number in range(count))
    )
    return file


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedVLLM]:
    """The scripted vLLM, in a folder with the module `asking`, twelve tasks and the models `one` and `other`."""
    (tmp_path / "asking.py").write_text(AGENT)
    write_tasks(tmp_path / "tasks.jsonl", 12)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    scripted = ScriptedVLLM()
    monkeypatch.setattr("lightning.trainer.stack.make_policy_server", scripted.make)
    yield scripted
    sys.modules.pop("asking", None)
