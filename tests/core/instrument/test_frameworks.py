"""Calls of a framework that has no adapter say so, since its agents have no names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import lightning
import pytest
from lightning.instrument import activate, component, emit, install_tap
from lightning.instrument.adapter_tools import replace_method
from lightning.instrument.marking import FRAMEWORKS
from lightning.plugins import plugins
from lightning.testing.chat_server import ChatServer

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CREW = """
import httpx

def kickoff(url, body):
    return httpx.post(url, json=body)
"""


@pytest.fixture
def crewai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    assert "crewai" in FRAMEWORKS
    installed = tmp_path / "site-packages"
    (installed / "crewai").mkdir(parents=True)
    (installed / "crewai" / "__init__.py").touch()
    (installed / "crewai" / "crew.py").write_text(CREW)
    monkeypatch.syspath_prepend(installed)
    importlib.invalidate_caches()
    yield importlib.import_module("crewai.crew")
    for name in ("crewai", "crewai.crew"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("adapters", [[], ["raw"]], ids=["none", "raw"])
def test_a_call_through_its_code_names_it_unless_the_user_names_the_call(
    crewai: ModuleType, adapters: list[str]
) -> None:
    with ChatServer() as server:
        undos = [install_tap(), plugins().install_adapters(emit, adapters)]
        url = f"{server.llm().base_url}/chat/completions"
        try:
            with activate(server.llm()):
                crewai.kickoff(url, BODY)
                with component("writer"):
                    crewai.kickoff(url, BODY)
                httpx.post(url, json=BODY)
        finally:
            for undo in reversed(undos):
                undo()
    theirs, named, own = (call.caller or lightning.Caller("") for call in server.calls)
    assert theirs.framework == "no-adapter:crewai"
    assert theirs.agent == (
        "test_a_call_through_its_code_names_it_unless_the_user_names_the_call" if adapters else "agent"
    )
    assert not named.framework.startswith("no-adapter")
    assert own.framework == ("raw" if adapters else "")


async def test_a_replaced_stream_is_still_an_asynchronous_generator_and_is_closed_with_its_reader() -> None:
    closed = []

    class Agent:
        async def stream(self, most: int) -> AsyncIterator[int]:
            try:
                for number in range(most):
                    yield number
            finally:
                closed.append("framework")

    async def doubled(stream: Callable[..., AsyncIterator[int]], agent: Agent, most: int) -> AsyncIterator[int]:
        try:
            async for number in stream(agent, most):
                yield 2 * number
        finally:
            closed.append("adapter")

    undo = replace_method(Agent, "stream", doubled)
    assert inspect.isasyncgenfunction(Agent.stream)
    assert [number async for number in Agent().stream(3)] == [0, 2, 4]
    closed.clear()
    reader = Agent().stream(3)
    assert await anext(reader) == 0
    await reader.aclose()
    assert closed[0] == "adapter"
    undo()
    assert [number async for number in Agent().stream(3)] == [0, 1, 2]
