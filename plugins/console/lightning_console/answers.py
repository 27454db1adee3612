"""Pages as a program gets them: JSON without what is only there to be looked at, for `--json` and for a coding agent.

The invariant: an answer says what the page of the same address says, has at most `BUDGET` characters, and names what was cut
from it and how to get that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightning_console import router
from lightning_console.address import Address
from lightning_console.blocks import with_whole_characters
from lightning_console.places import Places

BUDGET: Final = 40_000
"""Characters of an answer: about ten thousand tokens of a model that reads it."""
BOUNDS: Final = ((100, 4_000), (40, 1_500), (15, 600), (5, 200))
"""How many items of a list and characters of a text are told; the first pair of them with which an answer keeps its budget."""
SHOWN_ONLY: Final = frozenset({"spark", "hint", "hints", "tone", "small", "whole", "dashed", "keys", "sort", "select"})
"""Fields that say how something looks."""
NOT_FOR_PROGRAMS: Final = frozenset({"Controls", "Actions"})
MORE: Final = "ask for the block alone (its title as `block`), or open an address in it, for more"


class Cut:
    """Bounds what is told, and keeps in words what was cut."""

    def __init__(self, items: int, characters: int) -> None:
        self.items, self.characters = items, characters
        self.said: dict[str, None] = {}

    def text(self, text: str) -> str:
        """The beginning of a text."""
        if len(text) <= self.characters:
            return text
        self.said[f"the first {self.characters} of {len(text)} characters of a text"] = None
        return f"{text[: self.characters]} …"

    def first(self, values: Sequence[Any]) -> list[Any]:
        """The first items of a list."""
        if len(values) > self.items:
            self.said[f"the first {self.items} of {len(values)} items of a list"] = None
        return list(values[: self.items])

    def even(self, count: int) -> list[int]:
        """Which of so many points of a curve are told: evenly, the first and the last among them."""
        if count <= self.items:
            return list(range(count))
        self.said[f"{self.items} of {count} points of a curve, evenly, the last among them"] = None
        return [round(place * (count - 1) / (self.items - 1)) for place in range(self.items)]


def compact(value: Any, cut: Cut) -> Any:
    """JSON without what is empty or only looks, its lists and texts bounded."""
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
    """The names of the columns, and rows of texts; a cell that opens an address has that beside its text."""
    rows = [
        [{"text": cut.text(cell["text"]), "to": cell["to"]} if cell["to"] else cut.text(cell["text"]) for cell in row]
        for row in cut.first(value["rows"])
    ]
    rest = {name: item for name, item in value.items() if name not in ("columns", "rows")}
    if rows:
        rest.pop("empty")
    return {"columns": [column["name"] for column in value["columns"]], "rows": rows, **compact(rest, cut)}


def _chart(value: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Curves, thinned evenly; the addresses of points are those of the points that are told."""
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
    """What was given and what was answered as texts, and the measures of the answer's tokens: one value where all are equal."""
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
"""Components of which an answer is not just their value."""


def _block(block: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    about = compact({"is": block["component"], "title": block["title"], "note": block["note"]}, cut)
    tell = TOLD.get(block["component"])
    return {**about, **(compact(block["value"], cut) if tell is None else tell(block["value"], cut))}


async def answer(places: Places, address: str | Address, block: str = "") -> dict[str, Any]:
    """The page of an address as a program gets it; of it one `block` alone, where one is named by its title. `error` is why it
    cannot be shown, `cut` what was cut from it."""
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
    """The blocks within the budget: with ever smaller bounds, and without the last of them where that is not enough."""
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
