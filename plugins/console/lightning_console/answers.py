"""The console's pages for programs: JSON without the fields that only affect the display, for `--json` and as MCP tools.

The invariant: an answer has the content of the page at the same address, has at most `BUDGET` characters, and names each part
that was cut and how to get it. The tools only read. A tool answers within `SECONDS` or fails with an error that says so; a
wrong argument is an error that names it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from lightning import __version__
from lightning.errors import MissingExtraError

from lightning_console import router
from lightning_console.blocks import with_whole_characters
from lightning_console.places import Places
from lightning_console.router import Address

if TYPE_CHECKING:
    from mcp.server import MCPServer

BUDGET: Final = 40_000
"""Most characters of an answer: about ten thousand tokens for the model that reads it."""
BOUNDS: Final = ((100, 4_000), (40, 1_500), (15, 600), (5, 200))
"""Pairs of most items in a list and most characters in a text. An answer uses the first pair that keeps it within `BUDGET`."""
SHOWN_ONLY: Final = frozenset({"spark", "hint", "hints", "tone", "small", "whole", "dashed", "keys", "sort", "select"})
"""Fields of blocks that only affect the display: answers leave them out."""
NOT_FOR_PROGRAMS: Final = frozenset({"Controls", "Actions"})
MORE: Final = "ask for the block alone (its title as `block`), or open an address in it, for more"


class Cut:
    """Shortens lists and texts to `items` and `characters`, and keeps in `said` a sentence about each kind of cut."""

    def __init__(self, items: int, characters: int) -> None:
        self.items, self.characters = items, characters
        self.said: dict[str, None] = {}

    def text(self, text: str) -> str:
        """Return the first `characters` of a text, with an ellipsis where it was cut."""
        if len(text) <= self.characters:
            return text
        self.said[f"the first {self.characters} of {len(text)} characters of a text"] = None
        return f"{text[: self.characters]} …"

    def first(self, values: Sequence[Any]) -> list[Any]:
        """Return the first `items` of a list, and note in `said` if some were cut."""
        if len(values) > self.items:
            self.said[f"the first {self.items} of {len(values)} items of a list"] = None
        return list(values[: self.items])

    def even(self, count: int) -> list[int]:
        """Return the indices of the points to keep of a curve of `count` points: evenly spaced, with the first and the last."""
        if count <= self.items:
            return list(range(count))
        self.said[f"{self.items} of {count} points of a curve, evenly, the last among them"] = None
        return [round(place * (count - 1) / (self.items - 1)) for place in range(self.items)]


def compact(value: Any, cut: Cut) -> Any:
    """Return a JSON value without empty fields and `SHOWN_ONLY` fields, with lists and texts shortened by `cut`."""
    if isinstance(value, Mapping):
        kept = {name: compact(item, cut) for name, item in value.items() if name not in SHOWN_ONLY}
        return {name: item for name, item in kept.items() if item not in ("", None, [], {})}
    if isinstance(value, list | tuple):
        return [compact(item, cut) for item in cut.first(value)]
    if isinstance(value, str):
        return cut.text(value)
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def _table(value: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Return a table as the names of its columns and rows of texts; a cell that is a link has its address as `to`."""
    rows = [
        [{"text": cut.text(cell["text"]), "to": cell["to"]} if cell["to"] else cut.text(cell["text"]) for cell in row]
        for row in cut.first(value["rows"])
    ]
    rest = {name: item for name, item in value.items() if name not in ("columns", "rows")}
    if rows:
        rest.pop("empty")
    return {"columns": [column["name"] for column in value["columns"]], "rows": rows, **compact(rest, cut)}


def _chart(value: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Return a chart whose curves are thinned evenly, with the addresses of the points that remain."""
    series = []
    for each in value["series"]:
        places = cut.even(len(each["points"]))
        told = {
            name: [each[name][place] for place in places] if len(each[name]) == len(each["points"]) else each[name]
            for name in ("points", "to")
        }
        series.append({"name": each["name"], **{name: item for name, item in told.items() if len(item)}})
    rest = {name: item for name, item in value.items() if name not in ("series", "bounds")}
    if series:
        rest.pop("empty")
    rounded = compact({"series": series}, Cut(max(cut.items, len(series)), cut.characters))
    return {**rounded, **compact(rest, cut)}


def _tokens(value: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Return a call's prompt and answer as texts, and each measure's values for the answer's tokens (one if all are equal)."""
    texts, prompt = value["texts"], value["prompt"]
    measures = []
    for each in value["measures"]:
        known = [number for number in each["values"][prompt:] if number is not None]
        values = {"all": known[0]} if known and len(set(known)) == 1 else {"values": cut.first(known)}
        unit = {"unit": each["unit"], "missing": each["missing"]}
        measures.append({"name": each["name"], **(values if known else {}), **unit})
    rest = {name: item for name, item in value.items() if name not in ("texts", "prompt", "measures")}
    said = {"prompt": "".join(texts[:prompt]), "answer": "".join(texts[prompt:])}
    return {**compact({**said, "tokens": len(texts) - prompt, "measures": measures}, cut), **compact(rest, cut)}


TOLD: Final[Mapping[str, Callable[[Mapping[str, Any], Cut], dict[str, Any]]]] = {
    "Table": _table,
    "Chart": _chart,
    "TokenStrip": _tokens,
}
"""Components that answers convert with a function of their own; the value of any other is only shortened."""


def _block(block: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    about = compact({"is": block["component"], "title": block["title"], "note": block["note"]}, cut)
    tell = TOLD.get(block["component"])
    return {**about, **(compact(block["value"], cut) if tell is None else tell(block["value"], cut))}


async def answer(places: Places, address: str | Address, block: str = "") -> dict[str, Any]:
    """Return the page of an address as JSON, or only its `block` with that title. The field `error` says why the page cannot be
    shown; `cut` lists the parts that were left out."""
    told: dict[str, Any] = with_whole_characters(await _answer(places, address, block))
    return told


async def _answer(places: Places, address: str | Address, block: str) -> dict[str, Any]:
    page = (await router.show(places, str(address))).to_json()
    if page["title"] == router.CANNOT:
        return {"address": page["address"], "error": page["blocks"][0]["value"]["notices"][0]["text"]}
    blocks = [each for each in page["blocks"] if each["component"] not in NOT_FOR_PROGRAMS]
    if block:
        titles = [each["title"] or each["component"] for each in blocks]
        blocks = [each for each, title in zip(blocks, titles, strict=True) if title == block]
        if not blocks:
            return {"address": page["address"], "error": f"no block is called {block[:100]!r}: {', '.join(titles)}"}
    said = {"address": page["address"], "title": page["title"], "next": page["next"], "previous": page["previous"]}
    kept = {name: text for name, text in said.items() if text}
    return {**kept, "may_change": page["live"], **_bounded(blocks)}


def _bounded(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the blocks within `BUDGET`: shorten lists and texts more and more, then leave out blocks from the last on."""
    told: list[dict[str, Any]] = []
    cut = Cut(*BOUNDS[0])
    for bounds in BOUNDS:
        cut = Cut(*bounds)
        told = [_block(block, cut) for block in blocks]
        if _size(told) <= BUDGET:
            break
    said, sizes = list(cut.said), [_size(each) for each in told]
    while len(told) > 1 and sum(sizes) > BUDGET:
        gone = told.pop()
        sizes.pop()
        said.append(f"the block {gone.get('title') or gone['is']}")
    return {"blocks": told, **({"cut": [*said, MORE]} if said else {})}


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str))


SECONDS: Final = 60.0
"""Seconds after which a tool that has not answered fails."""
PATIENCE: Final = 20.0
"""Seconds that a tool waits for slow parts of a page (advice, profiles). Without them the page says so; they follow the next
time it is asked."""
INSTRUCTIONS: Final = """Recorded runs of `lightning`, which trains agents by reinforcement learning.
Begin with `runs`, then `run` for one: its alarms and advice come first, each with its evidence. Answers name addresses (fields
called `to`, `next` and `previous`); give one to `page` to open it: a step, a group of sibling rollouts, a rollout's calls and
the reason for each token's push. `cut` says what an answer leaves out; `page` with a `block` (a title) gives more of that block
alone. Steps are numbered from 1. Nothing here changes anything. `lightning console --skill` prints how to improve an agent with
these tools."""


class Tools:
    """The tools of the MCP server, which read the runs at a place: each public method is one tool."""

    def __init__(self, places: Places) -> None:
        self._places = places

    async def runs(self, search: str = "", cursor: str = "") -> dict[str, Any]:
        """List runs with state, alarms, reward and held-out result, newest first. `search`: words in their names, models or
        algorithms."""
        options = {name: value for name, value in (("q", search), ("cursor", cursor)) if value}
        return await self._show(Address("runs", options=options))

    async def run(self, run: str) -> dict[str, Any]:
        """One run: alarms and advice (each with evidence and its --set line), then its curves and figures. The page
        `metrics/RUN` has all metrics, `run/RUN?chart=NAME,NAME` the curves of those that you name."""
        return await self._show(Address("run", (run,)))

    async def step(self, run: str, step: int) -> dict[str, Any]:
        """One optimizer step, from 1: why its reward moved since the step before (chance, harder tasks, failures, groups), its
        groups, the spread of their rewards, and which groups taught nothing and why."""
        return await self._show(Address("step", (run, str(step))))

    async def pushed(self, run: str, step: int) -> dict[str, Any]:
        """What one step taught: the calls (and tokens, where they differ) that it pushed up and down most, with their
        answers."""
        return await self._show(Address("pushed", (run, str(step))))

    async def group(self, run: str, group: str) -> dict[str, Any]:
        """The rollouts of one task (a group such as RUN/3/0) and their branches as a prefix tree of calls: where they diverge,
        and what each earned."""
        return await self._show(Address("group", (run, group)))

    async def rollout(self, run: str, rollout: str, call: int = 0) -> dict[str, Any]:
        """One rollout: messages, tools, rewards; the tokens of one call (from 1; 0: the first trained one) and the proved
        reason for their push; its branches, the value of each call by its branches, and the command that makes branches at that
        call."""
        options = {"call": str(call)} if call else {}
        return await self._show(Address("rollout", (run, rollout), options))

    async def compare(self, runs: list[str]) -> dict[str, Any]:
        """Compare runs side by side: curves, settings that differ, held-out results with intervals."""
        if not any(runs):
            raise self._refused("`runs` names no run: give two or more, as in the list of runs")
        return await self._show(Address("compare", options={"runs": ",".join(runs)}))

    async def rewards(self, run: str) -> dict[str, Any]:
        """The distribution and correlation of a run's named rewards, and what other reward functions gave."""
        return await self._show(Address("rewards", (run,)))

    async def tools(self, run: str, tool: str = "", step: int = 0) -> dict[str, Any]:
        """The tools of a run by agent: runs, failures, errors, the arguments that fail, the reward beside them, and calls of
        tools that were not offered; of one `tool`, or of the training rollouts of one `step`."""
        of_step = {"step": str(step), "split": "train"} if step else {}
        options = {**({"tool": tool} if tool else {}), **of_step}
        return await self._show(Address("tools", (run,), options))

    async def search(
        self,
        run: str,
        text: str,
        where: str = "",
        cursor: int = 0,
        above: float | None = None,
        below: float | None = None,
    ) -> dict[str, Any]:
        """Find the rollouts of a run in which a text stands, without regard to case. `where`: task, prompt, answer, tool or
        error (empty: anywhere); `above` and `below` bound the reward; `cursor`: how many rollouts to pass over."""
        given = {"q": text, "where": where, "cursor": cursor or "", "above": above, "below": below}
        options = {name: str(value) for name, value in given.items() if value not in ("", None)}
        return await self._show(Address("search", (run,), options))

    async def resources(self, name: str = "") -> dict[str, Any]:
        """Versions of prompts and weights, their aliases and what each earned; with a name, that resource alone and the
        difference of two versions."""
        return await self._show(Address("resources", (name,) if name else ()))

    async def page(self, address: str, block: str = "") -> dict[str, Any]:
        """Open any page by an address from another answer, such as `rollout/RUN/ROLLOUT?call=2`; with `block` (a title), only
        that block."""
        return await self._show(address, block)

    async def _show(self, address: str | Address, block: str = "") -> dict[str, Any]:
        """Return the page of an address as JSON. Raises `ToolError` if it cannot be shown, or not within `SECONDS`."""
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
    """Make the MCP server for the runs at the place `where`. Raises `MissingExtraError` if the package `mcp` is missing."""
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
    of_one_run = (
        tools.run,
        tools.step,
        tools.pushed,
        tools.group,
        tools.rollout,
        tools.rewards,
        tools.tools,
        tools.search,
    )
    for tool in (tools.runs, *of_one_run, tools.compare, tools.resources, tools.page):
        server.tool(annotations=reads)(tool)
    return server


async def serve_stdio(where: str) -> None:
    """Run the MCP server for the place `where` on standard input and output until the client disconnects."""
    await make_server(where).run_stdio_async()
