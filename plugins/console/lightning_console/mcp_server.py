"""The console's pages for a coding agent: an MCP server on standard input and output, whose tools answer JSON.

The invariant: the tools only read, each answers within `SECONDS` or says that it did not, and what was asked for wrongly is an
error that names what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from lightning import __version__
from lightning.errors import MissingExtraError

from lightning_console.address import Address
from lightning_console.answers import answer
from lightning_console.places import Places

if TYPE_CHECKING:
    from mcp.server import MCPServer

SECONDS: Final = 60.0
"""Seconds that a tool may take."""
PATIENCE: Final = 20.0
"""Seconds after which a page is answered without what takes long (advice, profiles): it says so, and has it the next time."""
INSTRUCTIONS: Final = """Recorded runs of `lightning`, which trains agents by reinforcement learning.
Begin with `runs`, then `run` for one: its alarms and advice come first, each with its evidence. Answers name addresses (fields
called `to`, `next` and `previous`); give one to `page` to open it: a step, a group of sibling rollouts, a rollout's calls and
the reason for each token's push. `cut` says what an answer leaves out; `page` with a `block` (a title) gives more of that block
alone. Steps are numbered from 0. Nothing here changes anything. `lightning console --skill` prints how to improve an agent with
these tools."""


class Tools:
    """What an agent can ask of a place; each method is a tool."""

    def __init__(self, places: Places) -> None:
        self._places = places

    async def runs(self, search: str = "", cursor: str = "") -> dict[str, Any]:
        """Runs with their state, alarms, reward and held-out result, newest first. `search`: in names, models, algorithms."""
        options = {name: value for name, value in (("q", search), ("cursor", cursor)) if value}
        return await self._show(Address("runs", options=options))

    async def run(self, run: str) -> dict[str, Any]:
        """One run: alarms and advice (each with evidence and its --set line), then its curves and figures."""
        return await self._show(Address("run", (run,)))

    async def step(self, run: str, step: int) -> dict[str, Any]:
        """One optimizer step, from 0: its groups, how their rewards spread, and which taught nothing and why."""
        return await self._show(Address("step", (run, str(step))))

    async def group(self, run: str, group: str) -> dict[str, Any]:
        """The rollouts of one task (such as RUN/3/0) and their branches as a prefix tree of calls: where they part, and what
        each earned."""
        return await self._show(Address("group", (run, group)))

    async def rollout(self, run: str, rollout: str, call: int = 0) -> dict[str, Any]:
        """One rollout: messages, tools, rewards; the tokens of a call (from 1; 0: the first that was trained) and the proved
        reason for their push; its branches, what each call is worth by them, and the command that makes some at that call."""
        options = {"call": str(call)} if call else {}
        return await self._show(Address("rollout", (run, rollout), options))

    async def compare(self, runs: list[str]) -> dict[str, Any]:
        """Runs side by side: curves, settings that differ, held-out results with intervals."""
        if not any(runs):
            raise self._refused("`runs` names no run: give two or more, as in the list of runs")
        return await self._show(Address("compare", options={"runs": ",".join(runs)}))

    async def rewards(self, run: str) -> dict[str, Any]:
        """The distribution and correlation of a run's named rewards, and what other reward functions gave."""
        return await self._show(Address("rewards", (run,)))

    async def resources(self, name: str = "") -> dict[str, Any]:
        """Versions of prompts and weights, their aliases and what each earned; of one resource, with a difference of texts."""
        return await self._show(Address("resources", (name,) if name else ()))

    async def page(self, address: str, block: str = "") -> dict[str, Any]:
        """Any page by an address that another answer named, such as `rollout/RUN/ROLLOUT?call=2`; of it one `block`, by its
        title."""
        return await self._show(address, block)

    async def _show(self, address: str | Address, block: str = "") -> dict[str, Any]:
        """The answer to an address. Raises `ToolError` for one that cannot be shown, or not in time."""
        try:
            found = await asyncio.wait_for(answer(self._places, address, block), SECONDS)
        except TimeoutError:
            raise self._refused(
                f"{address} took longer than {SECONDS:g} s. What was begun may be there when you ask again; a step, a group or "
                "a rollout takes less than a whole run"
            ) from None
        if "error" in found:
            raise self._refused(found["error"])
        return found

    @staticmethod
    def _refused(why: str) -> Exception:
        from mcp.server.mcpserver.exceptions import ToolError

        return ToolError(why)


def make_server(where: str) -> MCPServer[Any]:
    """The server for a place. Raises `MissingExtraError` where the package `mcp` is not installed."""
    try:
        from mcp.server import MCPServer
        from mcp_types import ToolAnnotations
    except ModuleNotFoundError as error:
        raise MissingExtraError("console", str(error.name)) from error

    places = Places(where, patience=PATIENCE)

    @asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await places.close()

    server: MCPServer[Any] = MCPServer(
        "lightning", version=__version__, instructions=INSTRUCTIONS, lifespan=lifespan, log_level="WARNING"
    )
    tools, reads = Tools(places), ToolAnnotations(read_only_hint=True, open_world_hint=False)
    of_one_run = (tools.run, tools.step, tools.group, tools.rollout, tools.rewards)
    for tool in (tools.runs, *of_one_run, tools.compare, tools.resources, tools.page):
        server.tool(annotations=reads)(tool)
    return server


async def serve_stdio(where: str) -> None:
    """Answer on standard input and output until the client goes away."""
    await make_server(where).run_stdio_async()
