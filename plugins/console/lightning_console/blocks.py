"""What a page is made of: blocks, each the value of one component of `static/`, which draws it and computes nothing.

The invariant: a value is plain JSON, and whatever a model, a tool or a user wrote is in it as text, which components put into
the page as text and never as markup. The same values are drawn by a live console and by an exported folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import orjson
from lightning.types import Json

HALF: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which texts of agents may have, and JSON as bytes cannot."""

Tone = Literal["", "good", "bad", "warn", "muted"]
"""How something is meant: its colour, always beside a word or a sign."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one place of a table. `to` is the address that it opens; `spark` are values of a small curve."""

    text: str
    to: str = ""
    tone: Tone = ""
    hint: str = ""
    spark: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `sort` is the address that shows the page sorted by it."""

    name: str
    kind: Literal["text", "number"] = "text"
    hint: str = ""
    sort: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Part of a page, by itself. `title` stands above it, `note` below."""

    title: str = field(default="", kw_only=True)
    note: str = field(default="", kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """What a component gets: its name, which is that of the class, `title`, `note` and, in `value`, the other fields."""
        value = asdict(self)
        title, note = value.pop("title"), value.pop("note")
        return {"component": type(self).__name__, "title": title, "note": note, "value": value}


@dataclass(frozen=True, slots=True)
class Table(Block):
    """Rows of cells. `empty` is said where there are none; `select` is the name of the option that takes the marked rows' keys,
    with `keys` one for each row, and `selected` those that are marked. `pages` are links to other pages of rows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    empty: str = "nothing here yet"
    keys: Sequence[str] = ()
    select: str = ""
    selected: Sequence[str] = ()
    pages: Sequence[Link] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A text that opens an address."""

    text: str
    to: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure with its name. `detail` is a second line: an interval, what it is over, the same with failures."""

    name: str
    value: str
    detail: str = ""
    tone: Tone = ""
    hint: str = ""
    to: str = ""


@dataclass(frozen=True, slots=True)
class Facts(Block):
    """Figures side by side."""

    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one cloud, of a chart. `points` are `[x, y]` or `[x, y, low, high]` (an interval); `to` is one address for
    each point, `hints` one text for each; both may be empty."""

    name: str
    points: Sequence[Sequence[float | None]]
    to: Sequence[str] = ()
    hints: Sequence[str] = ()
    tone: Tone = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart(Block):
    """Curves, points or bars over a common axis. A click on a point opens its address. `marks` are vertical lines with a text
    (a resume, an alarm): `[x, text]`. `whole` axes show whole numbers only."""

    series: Sequence[Series]
    x: str
    y: str
    kind: Literal["line", "scatter", "bar"] = "line"
    marks: Sequence[tuple[float, str]] = ()
    bounds: tuple[float | None, float | None] = (None, None)
    whole: bool = False
    small: bool = False
    empty: str = "nothing was measured yet"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that is said: an alarm, an advice, an error. `commands` are to be copied."""

    text: str
    tone: Tone = ""
    detail: str = ""
    links: Sequence[Link] = ()
    commands: Sequence[str] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class Notices(Block):
    """Alarms, advice or plain words, the most urgent first."""

    notices: Sequence[Notice]
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """Something to choose on a page: its value is the option `name` of the page's address."""

    name: str
    label: str
    value: str
    choices: Sequence[tuple[str, str]] = ()
    """`(value, label)`; empty for free text."""


@dataclass(frozen=True, slots=True)
class Controls(Block):
    """Filters of the page. A change opens the page's address with that option."""

    address: str
    controls: Sequence[Control]


@dataclass(frozen=True, slots=True)
class Action:
    """A button that changes something: the only way in which the console does. `arguments` go with it; `ask` is what a person
    confirms; `fields` are texts that they give, as `(name, label)`."""

    name: str
    label: str
    arguments: Mapping[str, Json]
    ask: str = ""
    fields: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Actions(Block):
    """Buttons. An exported page leaves them out."""

    actions: Sequence[Action]


@dataclass(frozen=True, slots=True)
class Messages(Block):
    """A conversation as people read it. `number` of a message is that of the call that it belongs to; `to` opens it."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is system, user, assistant, tool or state. `text` is shown as it is; `data` are arguments or results as JSON text,
    by name; `tag` says more of it (the agent's name, why it ended)."""

    role: str
    text: str
    tag: str = ""
    data: Sequence[tuple[str, str]] = ()
    tone: Tone = ""
    to: str = ""


@dataclass(frozen=True, slots=True)
class Diff(Block):
    """Two texts side by side, line by line and word by word: the component finds what differs. `left` and `right` are their
    names."""

    left: str
    right: str
    before: str
    after: str
    to_left: str = ""
    to_right: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in seconds since the beginning. `lane` is the index of its lane; `kind` is agent, call, tool or
    reward (a moment: `begin == end`)."""

    lane: int
    kind: Literal["agent", "call", "tool", "reward", "state"]
    name: str
    begin: float
    end: float
    tone: Tone = ""
    hint: str = ""
    to: str = ""
    selected: bool = False


@dataclass(frozen=True, slots=True)
class Timeline(Block):
    """What ran when, in lanes: one for each agent, and as many more as ran at a time. Arrow keys go from span to span."""

    lanes: Sequence[str]
    spans: Sequence[Span]
    seconds: float


@dataclass(frozen=True, slots=True)
class Node:
    """A call in a group's prefix tree. `value` is the mean return of the rollouts that went through it and of the branches that
    begin behind it, `visits` how many the former are, `advantage` what training made of the action that led here (None where
    nothing was trained). `action` is the text of the answer that led here, shortened; `parent` the index of the node before, -1
    for the root. `rollouts` are the addresses of those that end here, `to` of the call of one that went through here."""

    parent: int
    action: str
    visits: int
    value: float | None
    advantage: float | None = None
    caller: str = ""
    to: str = ""
    rollouts: Sequence[Link] = ()
    compare: str = ""
    """The address that compares the continuations below this node, where they part."""
    branch: str = ""
    """Set where none but branches were: what they change, or that they are branches."""
    branches: int = 0
    """How many branches begin behind it."""
    tools: Sequence[tuple[str, str]] = ()
    """Tools that ran because of the answer, by name, and what came of them."""


@dataclass(frozen=True, slots=True)
class GroupTree(Block):
    """Sibling rollouts as one prefix tree of calls: node = value, edge = action, width = visits, colour = advantage."""

    nodes: Sequence[Node]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measure:
    """What tokens can be coloured by: one value for each token, None where it has none. `about` says if 0 is in the middle."""

    name: str
    values: Sequence[float | None]
    about: Literal["diverging", "sequential"] = "sequential"
    unit: str = ""
    missing: str = ""
    """Why no token has a value, empty where some have."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A step on the way from a reward to a token's push: what it is, its number, and where the number is from."""

    name: str
    value: str
    source: str = ""
    proved: bool | None = None
    """Whether an audit derives the same again; None for what it does not derive."""


@dataclass(frozen=True, slots=True)
class TokenStrip(Block):
    """Tokens of a call's prompt and answer, coloured by a measure. `texts` are their texts, the first `prompt` of them those
    that were given and not sampled. `why` are the reasons for all tokens of the answer. `prompt_left_out` counts tokens of the
    prompt before the first that is shown."""

    texts: Sequence[str]
    prompt: int
    measures: Sequence[Measure]
    why: Sequence[Reason] = ()
    prompt_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """What an address shows. `trail` are the pages above it; `live` that it may change, because a run goes on; `previous` and
    `next` are addresses that the keys `[` and `]` open."""

    address: str
    title: str
    blocks: Sequence[Block]
    trail: Sequence[Link] = ()
    live: bool = False
    previous: str = ""
    next: str = ""

    def to_json(self) -> dict[str, Any]:
        """The page as the shell and an export keep it."""
        return {
            "address": self.address,
            "title": self.title,
            "trail": [asdict(link) for link in self.trail],
            "live": self.live,
            "previous": self.previous,
            "next": self.next,
            "blocks": [block.to_json() for block in self.blocks],
        }


def with_whole_characters(value: Any) -> Any:
    """A value of JSON in which each half of a surrogate pair is written out, as `\\ud800`."""
    match value:
        case str():
            return HALF.sub(lambda found: ascii(found[0])[1:-1], value)
        case Mapping():
            return {with_whole_characters(name): with_whole_characters(item) for name, item in value.items()}
        case list() | tuple():
            return [with_whole_characters(item) for item in value]
        case _:
            return value


def json_of(value: Any) -> bytes:
    """A page, or what else is told of some, as JSON; what it does not know as text. Raises `TypeError` for a number that JSON
    does not have."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # rare, and to look for it costs more than to write
        return orjson.dumps(
            with_whole_characters(value),
            default=lambda other: with_whole_characters(str(other)),
            option=orjson.OPT_NON_STR_KEYS,
        )
