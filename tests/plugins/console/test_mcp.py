"""A coding agent drives the console over standard input and output, with the official client; the same is JSON for programs."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import ConfigError, DataError
from lightning.store.memory import MemoryStore
from lightning.trainer.context import mark_over
from lightning.types import Run
from lightning_console import answers, router
from lightning_console.answers import BUDGET, MORE, Cut, answer, compact
from lightning_console.blocks import Chart, Measure, Page, Reason, Series, TokenStrip
from lightning_console.command import console
from lightning_console.places import Places

from tests.core.trainer.conftest import open_bench
from tests.plugins.console import made_pages

TOOLS = {
    "runs",
    "run",
    "step",
    "pushed",
    "group",
    "rollout",
    "compare",
    "rewards",
    "tools",
    "search",
    "resources",
    "page",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that the trainer recorded, with a scripted model and an engine that only counts."""
    folder = tmp_path_factory.mktemp("recorded") / "runs" / "first"

    async def train() -> None:
        folder.parent.mkdir()
        async with open_bench(folder) as made:
            await made.loop.run({})
            await mark_over(made.store, "run", True)

    asyncio.run(train())
    return folder.parent


def rows_of(folder: Path) -> str:
    """All that a database holds."""
    with sqlite3.connect(folder / "first" / "lightning.db") as database:
        return "\n".join(database.iterdump())


@pytest.mark.slow
async def test_an_agent_goes_through_a_run_over_stdio(recorded: Path) -> None:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    before = rows_of(recorded)
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "lightning", "console", str(recorded), "--mcp"], env=dict(os.environ)
    )
    async with Client(stdio_client(command)) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == TOOLS
        assert all(tool.description and tool.annotations and tool.annotations.read_only_hint for tool in tools)

        async def ask(tool: str, **given: Any) -> dict[str, Any]:
            found = await client.call_tool(tool, given)
            assert not found.is_error, found.content
            assert len(json.dumps(found.structured_content)) <= 1.3 * BUDGET
            return dict(found.structured_content or {})

        def block(found: dict[str, Any], title: str) -> dict[str, Any]:
            return next(each for each in found["blocks"] if title in (each.get("title"), each["is"]))

        async def refused(tool: str, **given: Any) -> str:
            found = await client.call_tool(tool, given)
            assert found.is_error
            return str(found.content[0].text)

        row = dict(zip((table := block(await ask("runs"), "Table"))["columns"], table["rows"][0], strict=True))
        assert row["run"] == {"text": "run", "to": "run/run"}
        assert row["state"] == "finished"
        shown = await ask("run", run="run")
        assert [each.get("title") for each in shown["blocks"]][1] == "Alarms"
        assert block(shown, "Reward")["series"][0]["to"] == ["step/run/1", "step/run/2", "step/run/3"]
        groups = block(await ask("step", run="run", step=3), "Groups")
        assert len(groups["rows"]) == 2
        taught = next(row for row in groups["rows"] if row[6] == "yes")[0]["to"].rpartition("/")[2].replace("%2F", "/")
        tree = block(await ask("group", run="run", group=taught), "The calls of all rollouts, as a tree")
        assert sum(len(node.get("rollouts", ())) for node in tree["nodes"]) == 4
        whys = []
        for index in range(4):
            one = await ask("rollout", run="run", rollout=f"{taught}/{index}", call=2)
            assert block(one, "What was said")["messages"]
            whys.append({each["name"]: each for each in block(one, "Tokens of call 2, by agent")["why"]})
        assert all(why["push"]["proved"] for why in whys if "push" in why)
        assert any("push" in why for why in whys), "rewards of a group that taught are not all equal"
        assert block(await ask("compare", runs=["run"]), "Runs")["rows"]
        assert block(await ask("rewards", run="run"), "Over the steps")["series"]
        assert (await ask("resources"))["blocks"]
        alone = await ask("page", address=groups["rows"][0][0]["to"], block="Rollouts")
        assert [each["title"] for each in alone["blocks"]] == ["Rollouts"]

        assert 'there is no run "nobody\'s"' in await refused("run", run="nobody's")
        assert "valid integer" in await refused("step", run="run", step="three")
        assert "the run run has the steps 1 to 3" in await refused("step", run="run", step=9)
        assert "counted from 1" in await refused("step", run="run", step=-1)
        assert "no group 'run/9/9'" in await refused("group", run="run", group="run/9/9")
        assert "has 2 calls" in await refused("rollout", run="run", rollout="run/3/0/1", call=7)
        assert "names no run" in await refused("compare", runs=[])
        assert "there is no page 'secrets'" in await refused("page", address="secrets")
        assert "no block is called 'Group'" in await refused("page", address="step/run/1", block="Group")
        assert "Field required" in await refused("rollout", run="run")
    assert rows_of(recorded) == before, "nothing was written"


async def test_a_tool_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcp.server.mcpserver.exceptions import ToolError

    async def forever(places: Places, text: str) -> Page:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(router, "show", forever)
    monkeypatch.setattr(answers, "SECONDS", 0.01)
    with pytest.raises(ToolError, match=r"run/a took longer than 0\.01 s"):
        await answers.Tools(Places("db", stores={})).run("a")


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
        "blocks": [{"is": "Table", "columns": ["run"], "rows": [[{"text": "a", "to": "run/a"}]]}],
    }
    assert [block["is"] for block in (await answer(places, "run/a"))["blocks"]] == ["Notices", "Table"]
    assert await answer(places, "run/b") == {"address": "run/b", "error": "there is no run 'b' in db"}
    assert "fault of the console" in (await answer(places, "step/a/1"))["error"]


def test_a_long_list_and_a_long_text_are_cut_and_that_is_said() -> None:
    cut = Cut(100, 4000)
    found = compact({"rows": list(range(5000)), "text": "x" * 100_000, "tone": "bad", "none": None, "zero": 0}, cut)
    assert len(found["rows"]) == 100
    assert len(found["text"]) == 4002
    assert set(found) == {"rows", "text", "zero"}
    assert len(cut.said) == 2


@pytest.mark.parametrize("count", [1, 99, 100, 101, 400, 12_345])
def test_a_curve_is_thinned_evenly_to_its_last_point(count: int) -> None:
    series = Series("reward", [[float(n), 0.5] for n in range(count)], to=[f"step/r/{n}" for n in range(count)])
    cut = Cut(100, 4000)
    (found,) = answers._block(Chart([series], "step", "reward").to_json(), cut)["series"]
    xs = [point[0] for point in found["points"]]
    assert (xs[0], xs[-1]) == (0.0, count - 1)
    assert len(xs) == min(count, 100)
    gaps = [after - before for before, after in pairwise(xs)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert found["to"] == [f"step/r/{x:.0f}" for x in xs], "each point opens its own step"
    assert bool(cut.said) == (count > 100)


def test_tokens_are_told_as_texts_with_one_value_where_all_are_equal() -> None:
    strip = TokenStrip(
        ["What", " is", " it?", "A", " bird"],
        3,
        [
            Measure("advantage", [None, None, None, 0.5, 0.5]),
            Measure("logprob", [None, None, None, -0.25, -1.5], unit="nats"),
            Measure("entropy", [None] * 5, missing="not recorded"),
        ],
        [Reason("push", "+0.1", "advantage × weight", True)],
    )
    found = answers._block(strip.to_json(), Cut(100, 4000))
    assert (found["prompt"], found["answer"], found["tokens"]) == ("What is it?", "A bird", 2)
    assert found["measures"] == [
        {"name": "advantage", "all": 0.5},
        {"name": "logprob", "values": [-0.25, -1.5], "unit": "nats"},
        {"name": "entropy", "missing": "not recorded"},
    ]
    assert found["why"][0]["proved"] is True


async def test_an_answer_has_a_budget_and_a_block_alone_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = [
        Chart([Series("r", [[float(n), n / 7] for n in range(120)])], "step", "reward", title=f"chart {chart}")
        for chart in range(40)
    ]

    async def show(places: Places, text: str) -> Page:
        return Page(text, "Many", curves)

    monkeypatch.setattr(router, "show", show)
    whole = await answer(Places("db", stores={}), "run/a")
    assert len(json.dumps(whole)) <= 1.1 * BUDGET
    assert len(whole["blocks"]) == 40
    assert whole["cut"][-1] == MORE
    alone = await answer(Places("db", stores={}), "run/a", "chart 7")
    assert len(alone["blocks"][0]["series"][0]["points"]) == 100 > len(whole["blocks"][0]["series"][0]["points"])
    curves *= 10
    most = await answer(Places("db", stores={}), "run/a")
    assert len(json.dumps(most)) <= 1.2 * BUDGET + 60 * len(curves)
    assert any("the block chart" in each for each in most["cut"])


def test_a_page_is_printed_as_json(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console(str(recorded), as_json=True)
    assert json.loads(capsys.readouterr().out)["title"] == "Runs"
    console(str(recorded / "first"), page="step/run/1", as_json=True)
    assert json.loads(capsys.readouterr().out)["address"] == "step/run/1"
    with pytest.raises(DataError, match="has the steps 1 to 3"):
        console(str(recorded / "first"), page="step/run/9", as_json=True)
    with pytest.raises(ConfigError, match="one of the three"):
        console(str(recorded), as_json=True, mcp=True)
