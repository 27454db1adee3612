"""The Agents SDK's tools wait for their turn where `runner.tool_limits` has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import lightning
import pytest
from agents import Agent, RunConfig, Runner, function_tool
from agents.models.multi_provider import MultiProvider
from agents.run_internal import tool_execution
from lightning.testing import ToolCall, rollout
from lightning.types import LLM, Task
from openai import AsyncOpenAI

from tests.adapters.limited_tools import AT_ONCE, SCRIPT, Search, limited, taken


async def run(agent: Agent, llm: LLM) -> float:
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        provider = MultiProvider(openai_client=client, openai_use_responses=False)
        await Runner.run(agent, "tea?", run_config=RunConfig(model_provider=provider))
    return 1.0


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize(("runs", "most"), [({"search": 1}, 1), ({"search": 2}, 2), ({"other": 1}, AT_ONCE)])
def test_as_many_runs_at_once_as_the_limit_says(tmp_path: Path, sync: bool, runs: dict[str, int], most: int) -> None:
    searching = Search(most)

    @function_tool(name_override="search")
    def search(query: str) -> str:
        """Search."""
        return searching.run()

    @function_tool(name_override="search")
    async def asearch(query: str) -> str:
        """Search."""
        return await searching.arun()

    async def agent(task: Task, llm: LLM) -> float:
        return await run(Agent("desk", tools=[search if sync else asearch], model=llm.model), llm)

    before = dict(vars(tool_execution))
    with limited(tmp_path, runs):
        record = rollout(agent, lightning.Task("tea?"), SCRIPT, adapters=["openai-agents"])
    assert record.rollout.error == ""
    assert searching.peak == most
    assert [event.status for event in record.tool_events] == ["ok"] * AT_ONCE
    assert dict(vars(tool_execution)) == before


def test_waiting_is_not_the_tools_time(tmp_path: Path) -> None:
    """The slot comes free when the time that the tool itself has would be over."""
    seconds = 1.0

    @function_tool(timeout=seconds)
    async def search(query: str) -> str:
        """Search."""
        return "tea is a drink"

    async def agent(task: Task, llm: LLM) -> float:
        with taken(tmp_path, "search"):
            running = asyncio.create_task(run(Agent("desk", tools=[search], model=llm.model), llm))
            await asyncio.sleep(2 * seconds)
        return await running

    with limited(tmp_path, {"search": 1}):
        script = [ToolCall("search", '{"query": "tea"}'), "found"]
        record = rollout(agent, lightning.Task("tea?"), script, adapters=["openai-agents"])
    assert [(event.status, event.output) for event in record.tool_events] == [("ok", "tea is a drink")]
