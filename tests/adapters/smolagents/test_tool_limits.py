"""smolagents' tools wait for their turn where `runner.tool_limits` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning
import pytest
from lightning.testing import ToolCall, rollout
from lightning.types import LLM, Task
from smolagents import OpenAIModel, Tool, ToolCallingAgent

from tests.adapters.limited_tools import AT_ONCE, SCRIPT, Search, limited


@pytest.mark.parametrize(("runs", "most"), [({"search": 1}, 1), ({"search": 2}, 2), ({"other": 1}, AT_ONCE)])
def test_as_many_runs_at_once_as_the_limit_says(tmp_path: Path, runs: dict[str, int], most: int) -> None:
    searching = Search(most)

    class Searches(Tool):
        name = "search"
        description = "Search."
        inputs: ClassVar[Any] = {"query": {"type": "string", "description": "What for."}}
        output_type = "string"

        def forward(self, query: str) -> str:
            return searching.run()

    def agent(task: Task, llm: LLM) -> float:
        model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)
        with model.client:
            ToolCallingAgent([Searches()], model, name="desk", verbosity_level=-1).run("tea?")
        return 1.0

    script = [SCRIPT[0], ToolCall("final_answer", '{"answer": "found"}')]
    with limited(tmp_path, runs):
        record = rollout(agent, lightning.Task("tea?"), script, adapters=["smolagents"])
    assert record.rollout.error == ""
    assert searching.peak == most
    assert [event.status for event in record.tool_events] == ["ok"] * AT_ONCE
