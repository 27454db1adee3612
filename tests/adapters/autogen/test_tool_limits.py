"""AutoGen's tools wait for their turn where `runner.tool_limits` has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import lightning
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import ModelFamily, ModelInfo
from autogen_core.tools import BaseStreamTool, BaseTool, FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from lightning.testing import rollout
from lightning.types import LLM, Task
from pydantic import BaseModel

from tests.adapters.limited_tools import AT_ONCE, SCRIPT, Search, limited

pytestmark = pytest.mark.filterwarnings("ignore:Resolved model mismatch:UserWarning")

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=False, family=ModelFamily.UNKNOWN
)


class Query(BaseModel):
    query: str


class Streaming(BaseStreamTool[Query, str, str]):
    """A tool that gives what it has as it comes."""

    def __init__(self, searching: Search) -> None:
        super().__init__(Query, str, "search", "Search.")
        self.searching = searching

    async def run(self, args: Query, cancellation_token: CancellationToken) -> str:
        return await self.searching.arun()

    async def run_stream(self, args: Query, cancellation_token: CancellationToken) -> AsyncGenerator[str, None]:
        yield await self.searching.arun()


def make_tool(kind: str, searching: Search) -> BaseTool[Any, Any]:
    def search(query: str) -> str:
        return searching.run()

    async def asearch(query: str) -> str:
        return await searching.arun()

    if kind == "stream":
        return Streaming(searching)
    return FunctionTool(search if kind == "sync" else asearch, "Search.", name="search")


@pytest.mark.parametrize("kind", ["sync", "async", "stream"])
@pytest.mark.parametrize(("runs", "most"), [({"search": 1}, 1), ({"search": 2}, 2), ({"other": 1}, AT_ONCE)])
def test_as_many_runs_at_once_as_the_limit_says(tmp_path: Path, kind: str, runs: dict[str, int], most: int) -> None:
    searching = Search(most)

    async def agent(task: Task, llm: LLM) -> float:
        client = OpenAIChatCompletionClient(
            model=llm.model, base_url=llm.base_url, api_key=llm.api_key, model_info=INFO
        )
        desk = AssistantAgent("desk", client, tools=[make_tool(kind, searching)], reflect_on_tool_use=True)
        await desk.run(task="tea?")
        await client.close()
        return 1.0

    before = dict(vars(BaseTool)), dict(vars(BaseStreamTool))
    with limited(tmp_path, runs):
        record = rollout(agent, lightning.Task("tea?"), SCRIPT, adapters=["autogen"])
    assert record.rollout.error == ""
    assert searching.peak == most
    assert [event.status for event in record.tool_events] == ["ok"] * AT_ONCE
    assert (dict(vars(BaseTool)), dict(vars(BaseStreamTool))) == before
