"""LangChain's tools wait for their turn where `runner.tool_limits` has them."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from lightning.testing import rollout
from lightning.types import LLM, Task

from tests.adapters.limited_tools import AT_ONCE, SCRIPT, Search, limited


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize(("runs", "most"), [({"search": 1}, 1), ({"search": 2}, 2), ({"other": 1}, AT_ONCE)])
def test_as_many_runs_at_once_as_the_limit_says(tmp_path: Path, sync: bool, runs: dict[str, int], most: int) -> None:
    searching = Search(most)

    def search(query: str) -> str:
        """Search."""
        return searching.run()

    async def asearch(query: str) -> str:
        """Search."""
        return await searching.arun()

    def sync_agent(task: Task, llm: LLM) -> float:
        model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)  # type: ignore[arg-type]
        create_agent(model, [tool(search)], name="desk").invoke({"messages": [("user", "tea?")]})
        model.root_client.close()
        return 1.0

    async def async_agent(task: Task, llm: LLM) -> float:
        model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)  # type: ignore[arg-type]
        await create_agent(model, [tool("search")(asearch)], name="desk").ainvoke({"messages": [("user", "tea?")]})
        await model.root_async_client.close()
        return 1.0

    before = dict(vars(BaseTool))
    with limited(tmp_path, runs):
        record = rollout(sync_agent if sync else async_agent, lightning.Task("tea?"), SCRIPT, adapters=["langchain"])
    assert record.rollout.error == ""
    assert searching.peak == most
    assert [event.status for event in record.tool_events] == ["ok"] * AT_ONCE
    assert dict(vars(BaseTool)) == before
