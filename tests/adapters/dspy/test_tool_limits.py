"""DSPy's tools wait for their turn where `runner.tool_limits` has them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy
import lightning
import pytest
from lightning.testing import Reply, rollout
from lightning.types import LLM, Task

from tests.adapters.limited_tools import AT_ONCE, Search, limited

MARKER = "[[ ## completed ## ]]"


def script(body: Mapping[str, Any]) -> Reply:
    """A search, the end of the loop, an answer."""
    said = body["messages"][-1]["content"]
    if "next_tool_name" not in said:
        return Reply(f"[[ ## reasoning ## ]]\nfound\n\n[[ ## answer ## ]]\nfound\n\n{MARKER}")
    name, arguments = ("finish", "{}") if "observation_0" in said else ("search", '{"query": "tea"}')
    fields = {"next_thought": "so", "next_tool_name": name, "next_tool_args": arguments}
    return Reply("".join(f"[[ ## {field} ## ]]\n{text}\n\n" for field, text in fields.items()) + MARKER)


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize(("runs", "most"), [({"search": 1}, 1), ({"search": 2}, 2), ({"other": 1}, AT_ONCE)])
def test_as_many_runs_at_once_as_the_limit_says(tmp_path: Path, sync: bool, runs: dict[str, int], most: int) -> None:
    searching = Search(most)

    def search(query: str) -> str:
        return searching.run()

    async def asearch(query: str) -> str:
        return await searching.arun()

    def lm(llm: LLM) -> dspy.LM:
        # LiteLLM, which DSPy would use where OPENAI_BASE_URL is set, never closes its clients.
        return dspy.LM(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key, cache=False, engine="lm15")

    def sync_agent(task: Task, llm: LLM) -> float:
        react = dspy.ReAct("question -> answer", [search])
        examples = [dspy.Example(question="tea?").with_inputs("question") for _ in range(AT_ONCE)]
        with contextlib.closing(lm(llm)) as model, dspy.context(lm=model):
            react.batch(examples, num_threads=AT_ONCE, disable_progress_bar=True)
        return 1.0

    async def async_agent(task: Task, llm: LLM) -> float:
        react = dspy.ReAct("question -> answer", [dspy.Tool(asearch, name="search")])
        with dspy.context(lm=lm(llm)):
            await asyncio.gather(*(react.acall(question="tea?") for _ in range(AT_ONCE)))
            await dspy.settings.lm.aclose()
        return 1.0

    with limited(tmp_path, runs):
        record = rollout(sync_agent if sync else async_agent, lightning.Task("tea?"), script, adapters=["dspy"])
    assert record.rollout.error == ""
    assert searching.peak == most
    assert [event.status for event in record.tool_events] == ["ok"] * AT_ONCE
