"""The console's pages for a coding agent: an MCP server on standard input and output, whose tools answer JSON.

The invariant: the tools only read; an answer is what the page of the same address shows, without what is only there to be
looked at, and it is bounded, with a word on what was cut.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from lightning import __version__
from lightning.errors import MissingExtraError

from lightning_console import router
from lightning_console.address import Address
from lightning_console.places import Places

if TYPE_CHECKING:
    from mcp.server import MCPServer

MOST_ITEMS: Final = 100
"""Items of a list that an answer has: rows, points, nodes, messages."""
LONGEST: Final = 4_000
"""Characters of a text in an answer."""
SHOWN_ONLY: Final = frozenset(
    {"spark", "hint", "hints", "tone", "small", "whole", "dashed", "keys", "kind", "sort", "lane"}
)
"""Fields that say how something looks."""
NOT_FOR_AGENTS: Final = frozenset({"Controls", "Actions"})
INSTRUCTIONS: Final = """Recorded runs of `lightning`, which trains agents by reinforcement learning.
Begin with `runs`, then `run` for one: its alarms and advice come first, each with its evidence. Answers name addresses (fields
called `to`); give one to `page` to open it: a step, a group of sibling rollouts, a rollout's calls and the reason for each
token's push. Nothing here changes anything. `lightning console --skill` prints how to improve an agent with these tools."""


def compact(value: Any, cut: list[str] | None = None) -> Any:
    """JSON without what is empty or only looks, its lists and texts bounded. `cut` gets a word for each thing that was cut."""
    cut = [] if cut is None else cut
    if isinstance(value, Mapping):
        kept = {name: compact(item, cut) for name, item in value.items() if name not in SHOWN_ONLY}
        return {name: item for name, item in kept.items() if item not in ("", None, [], {})}
    if isinstance(value, list | tuple):
        if len(value) > MOST_ITEMS:
            cut.append(f"the first {MOST_ITEMS} of {len(value)} items of a list")
        return [compact(item, cut) for item in value[:MOST_ITEMS]]
    if isinstance(value, str) and len(value) > LONGEST:
        cut.append(f"the first {LONGEST} of {len(value)} characters of a text")
        return value[:LONGEST] + " …"
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


async def answer(places: Places, address: str | Address) -> dict[str, Any]:
    """The page of an address as an agent gets it; `error` is why it cannot be shown."""
    page = (await router.show(places, str(address))).to_json()
    blocks, cut = [], list[str]()
    for block in page["blocks"]:
        if block["component"] not in NOT_FOR_AGENTS:
            about = {"is": block["component"], "title": block["title"], "note": block["note"]}
            blocks.append(compact({**about, **block["value"]}, cut))
    said = {"address": page["address"], "title": page["title"], "next": page["next"], "previous": page["previous"]}
    if page["title"] == router.CANNOT:
        return {"address": page["address"], "error": " ".join(item["text"] for item in blocks[0]["notices"])}
    return {**compact(said), "may_change": page["live"], "blocks": blocks, **({"cut": sorted(set(cut))} if cut else {})}


def make_server(where: str) -> MCPServer[Any]:
    """The server for a place. Raises `MissingExtraError` where the package `mcp` is not installed."""
    try:
        from mcp.server import MCPServer
    except ModuleNotFoundError as error:
        raise MissingExtraError("console", str(error.name)) from error

    places = Places(where)

    @asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await places.close()

    server: MCPServer[Any] = MCPServer(
        "lightning", version=__version__, instructions=INSTRUCTIONS, lifespan=lifespan, log_level="WARNING"
    )

    @server.tool()
    async def runs(search: str = "", cursor: str = "") -> dict[str, Any]:
        """Runs with their state, alarms, reward and held-out result, newest first. `search`: in names, models, algorithms."""
        options = {name: value for name, value in (("q", search), ("cursor", cursor)) if value}
        return await answer(places, Address("runs", options=options))

    @server.tool()
    async def run(run: str) -> dict[str, Any]:
        """One run: alarms and advice (each with evidence and its --set line), then its curves and figures."""
        return await answer(places, Address("run", (run,)))

    @server.tool()
    async def step(run: str, step: int) -> dict[str, Any]:
        """One optimizer step: its groups, how their rewards spread, and which taught nothing and why."""
        return await answer(places, Address("step", (run, str(step))))

    @server.tool()
    async def group(run: str, group: str) -> dict[str, Any]:
        """The rollouts of one task as a prefix tree of calls: where they part, and what each continuation earned."""
        return await answer(places, Address("group", (run, group)))

    @server.tool()
    async def rollout(run: str, rollout: str, call: int | None = None) -> dict[str, Any]:
        """One rollout: messages, tools, rewards; with `call`, the tokens of that call and the proved reason for their push."""
        options = {} if call is None else {"call": str(call)}
        return await answer(places, Address("rollout", (run, rollout), options))

    @server.tool()
    async def compare(runs: list[str]) -> dict[str, Any]:
        """Runs side by side: curves, settings that differ, held-out results with intervals."""
        return await answer(places, Address("compare", options={"runs": ",".join(runs)}))

    @server.tool()
    async def rewards(run: str) -> dict[str, Any]:
        """The distribution and correlation of a run's named rewards, and what other reward functions gave."""
        return await answer(places, Address("rewards", (run,)))

    @server.tool()
    async def resources(name: str = "") -> dict[str, Any]:
        """Versions of prompts and weights, their aliases and what each earned; of one resource, with a difference of texts."""
        return await answer(places, Address("resources", (name,) if name else ()))

    @server.tool()
    async def page(address: str) -> dict[str, Any]:
        """Any page by an address that another answer named, such as `rollout/RUN/ROLLOUT?call=2`."""
        return await answer(places, address)

    return server


async def serve_stdio(where: str) -> None:
    """Answer on standard input and output until the client goes away."""
    await make_server(where).run_stdio_async()
