"""docs/frameworks/plain-python.md: both sides of its diff run, and what is typed there is understood."""

from __future__ import annotations

import asyncio
import re
import types
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer
from lightning.cli.app import build
from lightning.cli.train import read_tasks
from lightning.config import settings
from lightning.instrument import activate, emit, install_tap
from lightning.plugins import plugins
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.types import LLM, Task
from openai import OpenAI

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "frameworks" / "plain-python.md").read_text()
TYPED = PAGE + (DOCS / "troubleshooting.md").read_text()
ASKED = [
    Reply("", tool_calls=[ToolCall("price", '{"item": "tea"}', "one")]),
    Reply("", tool_calls=[ToolCall("price", '{"item": "gold"}', "two")]),
    Reply("It is 3."),
]


def side(left_out: str) -> types.ModuleType:
    """The program before (without the lines that `+` begins) or after (without those of `-`)."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert {line[0] for line in diff.splitlines()} == set("+- ")
    lines = [line[1:] for line in diff.splitlines() if line[0] != left_out]
    module = types.ModuleType("page")
    exec("\n".join(lines), vars(module))
    return module


async def test_the_agent_of_before_runs_by_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeVLLM() as fake:
        fake.model = "gpt-4o-mini"
        fake.queue(*ASKED)
        monkeypatch.setenv("OPENAI_BASE_URL", f"{fake.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "a key")
        page = side("+")
        with page.client:
            assert await asyncio.to_thread(page.answer, "What is a tea?") == "It is 3."


async def test_the_agent_of_after_earns_its_reward_and_its_tools_are_recorded() -> None:
    async with FakeVLLM() as fake:
        fake.queue(*ASKED)
        llm = LLM(f"{fake.url}/v1", "a key", fake.model)
        page, clients = side("-"), ExitStack()
        # It leaves its clients to the end of the process.
        vars(page)["OpenAI"] = lambda **given: clients.enter_context(OpenAI(**given))
        undo = [clients.close, install_tap(), plugins().install_adapters(emit, ["raw"])]
        try:
            with activate(llm) as session:
                assert await asyncio.to_thread(page.agent, Task("What is a tea?", "3"), llm) == 1.0
        finally:
            for each in undo:
                each()
        assert [(event.name, event.status) for event in session.tool_events] == [("price", "ok"), ("price", "error")]
        told = [message["content"] for message in fake.requests[-1].body["messages"] if message["role"] == "tool"]
        assert told == ["3", "error: KeyError('gold')"]
        paths = [request.headers["x-lightning-caller"] for request in fake.requests]
        assert all('"path":["agent","answer"]' in path for path in paths)


def test_its_tasks_are_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    file = tmp_path / "train.jsonl"
    file.write_text(text)
    assert [task.expected for task in read_tasks(file)] == ["6", "7"]


def test_settings_are_ones_that_there_are() -> None:
    known = {setting.key for setting in settings()} | {"engine.lora"}
    named = set(
        re.findall(r"`(?:--set )?'?((?:trainer|engine|policy_server|gateway|server|runner)\.\w[\w.]*+)(?!\()", TYPED)
    )
    assert len(named) > 15
    assert {name for name in named if not any(name == key or name.startswith(f"{key}.") for key in known)} == set()


def test_options_are_ones_that_there_are() -> None:
    lines = re.findall(r"^lightning (\w+) ?([^#\n]*)", TYPED, re.MULTILINE)
    assert len(lines) > 6
    for name, typed in lines:
        command = typer.main.get_command(build(name)).commands[name]  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {}).get(typed.partition(" ")[0], command)
        options = {option for item in inner.params for option in item.opts} | {"--debug"}
        assert options.issuperset(re.findall(r"--[a-z-]+", typed)), f"lightning {name} {typed}"
