"""A coding agent drives the console over standard input and output, with the official client."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.types import Run
from lightning_console.mcp_server import LONGEST, MOST_ITEMS, answer, compact
from lightning_console.places import Places

from tests.plugins.console import made_pages

TOOLS = {"runs", "run", "step", "group", "rollout", "compare", "rewards", "resources", "page"}


@pytest.mark.slow
async def test_an_agent_asks_over_stdio(tmp_path: Path) -> None:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    folder = tmp_path / "a"
    folder.mkdir()
    store = SqliteStore(folder / "lightning.db")
    await store.open()
    await store.put_run(Run("a", "the run"))
    await store.close()
    command = StdioServerParameters(command=sys.executable, args=["-m", "lightning", "console", str(tmp_path), "--mcp"])
    async with Client(stdio_client(command)) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        assert all(tool.description for tool in (await client.list_tools()).tools)
        missing = await client.call_tool("run", {"run": "nobody's"})
        assert "error" in (missing.structured_content or {})
        wrong = await client.call_tool("step", {"run": "a", "step": "three"})
        assert wrong.is_error


async def test_an_answer_is_the_page_without_its_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    made_pages.register(monkeypatch)
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("a", "the run"))
    places = Places("db", stores={"db": store})
    assert await answer(places, "runs") == {
        "address": "runs",
        "title": "Runs",
        "may_change": False,
        "blocks": [
            {
                "is": "Table",
                "columns": [{"name": "run"}],
                "rows": [[{"text": "a", "to": "run/a"}]],
                "empty": "nothing here yet",
            }
        ],
    }
    assert [block["is"] for block in (await answer(places, "run/a"))["blocks"]] == ["Notices", "Table"]
    assert await answer(places, "run/b") == {"address": "run/b", "error": "there is no run 'b' in db"}
    assert "fault of the console" in (await answer(places, "step/a/1"))["error"]


def test_an_answer_is_bounded_and_says_so() -> None:
    cut: list[str] = []
    found = compact({"rows": list(range(5000)), "text": "x" * 100_000, "tone": "bad", "none": None, "zero": 0}, cut)
    assert len(found["rows"]) == MOST_ITEMS
    assert len(found["text"]) == LONGEST + 2
    assert set(found) == {"rows", "text", "zero"}
    assert len(cut) == 2
