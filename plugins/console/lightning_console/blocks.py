"""The blocks of a page. Each is the value of one component of `static/`, which draws it and computes nothing.

The invariant: a value is plain JSON. Text of a model, a tool or a user is a string in it, which a component inserts as text and
never as markup. A live console and an exported folder draw the same values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import orjson
from lightning.types import Json

from lightning_console.glossary import explained, with_hints

HALF: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. Texts of agents may have such a character, but JSON in UTF-8 cannot."""

Tone = Literal["", "good", "bad", "warn", "muted", "up", "down"]
"""The colour of an item, with the sign beside it: good (✓) and bad (✕), a warning (!), of little weight, or a difference or an
advantage above (▲) or below (▼) 0. Each colour means this one thing on all pages."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. `to` is the address that a click opens; `spark` has the values of a small curve drawn in it."""

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
    """One part of a page, with `title` above it and `note` below; the base class of all components' values. A `folded` block
    shows its title, and the rest when the reader asks for it."""

    title: str = field(default="", kw_only=True)
    note: str = field(default="", kw_only=True)
    folded: bool = field(default=False, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the block's component: its name (the class's), `title` with its `hint`, `note`, and other fields
        as `value`. Names that the glossary has get its explanation as hint."""
        value = asdict(self)
        title, note, folded = value.pop("title"), value.pop("note"), value.pop("folded")
        with_hints(value)
        return {
            "component": type(self).__name__,
            "title": title,
            "hint": explained(title),
            "note": note,
            "folded": folded,
            "value": value,
        }


@dataclass(frozen=True, slots=True)
class Table(Block):
    """Rows of cells. `empty` is the text for a table without rows. `select` is the option of the address that takes the keys of
    the marked rows; `keys` has one key for each row, `selected` the marked ones. `pages` are links to other pages of rows."""

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
    """One figure with its name. `detail` is a second line, such as an interval, the number of rollouts, or the figure with
    failures."""

    name: str
    value: str
    detail: str = ""
    tone: Tone = ""
    hint: str = ""
    to: str = ""


@dataclass(frozen=True, slots=True)
class Facts(Block):
    """A row of figures side by side."""

    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one cloud of points, of a chart. `points` are `[x, y]` or `[x, y, low, high]` (an interval). `to` has an
    address and `hints` a text for each point; both may be empty."""

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
    """A message of the console: an alarm, an advice or an error. `commands` are command lines for the reader to copy. A
    `folded` detail is shown when the reader asks for it."""

    text: str
    tone: Tone = ""
    detail: str = ""
    links: Sequence[Link] = ()
    commands: Sequence[str] = ()
    key: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Notices(Block):
    """A list of messages: alarms, advice or plain sentences, the most urgent first."""

    notices: Sequence[Notice]
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """A filter or a choice on a page. Its value is the option `name` of the page's address."""

    name: str
    label: str
    value: str
    choices: Sequence[tuple[str, str]] = ()
    """The choices as `(value, label)`; empty for free text."""


@dataclass(frozen=True, slots=True)
class Controls(Block):
    """Filters of the page. A change opens the page's address with that option."""

    address: str
    controls: Sequence[Control]


@dataclass(frozen=True, slots=True)
class Action:
    """A button that changes something; nothing else in the console does. `arguments` are sent with it, `ask` is the question
    that a person confirms first, and `fields` are the texts that they type in, as `(name, label)`."""

    name: str
    label: str
    arguments: Mapping[str, Json]
    ask: str = ""
    fields: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Actions(Block):
    """A row of buttons. An exported page leaves them out."""

    actions: Sequence[Action]


@dataclass(frozen=True, slots=True)
class Messages(Block):
    """A conversation as people read it: each message once, in order."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `role` is system, user, assistant, tool, state, reward or judge; `text` is shown as it is;
    `data` has arguments or results as JSON text, by name; `tag` adds details (the agent's name, why the answer ended); `to`
    opens its call. `made` says that the model sampled it in this rollout: other messages came with a prompt."""

    role: str
    text: str
    tag: str = ""
    data: Sequence[tuple[str, str]] = ()
    tone: Tone = ""
    to: str = ""
    made: bool = False


@dataclass(frozen=True, slots=True)
class Diff(Block):
    """The texts `before` and `after` side by side; the component marks the lines and words that differ. `left` and `right` are
    their names, `to_left` and `to_right` the addresses that these open."""

    left: str
    right: str
    before: str
    after: str
    to_left: str = ""
    to_right: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of a timeline, from `begin` to `end` in seconds since the timeline's start. `lane` is the index of its lane. A
    reward and a state are moments: `begin == end`."""

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
    """Spans over time, in lanes: at least one for each agent, more where its spans overlap. Arrow keys move between spans."""

    lanes: Sequence[str]
    spans: Sequence[Span]
    seconds: float


@dataclass(frozen=True, slots=True)
class Node:
    """A call in a group's prefix tree. `visits` counts the rollouts that went through it; `value` is the mean return of these
    and of the branches that begin after it. `action` is the text of the call's answer, shortened; `advantage` is its mean
    advantage in training (None if it was not trained). `parent` is the index of the parent node, -1 for the root. `rollouts`
    link to the rollouts that end here; `to` opens the call in one of the rollouts that went through it."""

    parent: int
    action: str
    visits: int
    value: float | None
    advantage: float | None = None
    caller: str = ""
    to: str = ""
    rollouts: Sequence[Link] = ()
    compare: str = ""
    """The address that compares the continuations after this node; empty where all continue alike."""
    branch: str = ""
    """For a node that only branches went through: their change, or "branch" if they have none. Empty for any other node."""
    branches: int = 0
    """How many branches begin after this call."""
    tools: Sequence[tuple[str, str]] = ()
    """The tools that the answer called, as `(name, result or error)`."""
    label: str = ""
    """The action as it stands beside its edge: the part in which it differs from its siblings. Empty: the action itself."""


@dataclass(frozen=True, slots=True)
class GroupTree(Block):
    """Sibling rollouts as one prefix tree of calls: node = value, edge = action, width = visits, colour = advantage. `low` and
    `high` are the least and the highest value of its nodes."""

    nodes: Sequence[Node]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure to colour tokens by: one value for each token, None for a token without one. `about` is "diverging" where 0 is
    the middle of the colours."""

    name: str
    values: Sequence[float | None]
    about: Literal["diverging", "sequential"] = "sequential"
    unit: str = ""
    missing: str = ""
    """Why no token has a value; empty if some have one."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """One step of the derivation from a reward to a token's push: its name, its number, and the source of the number."""

    name: str
    value: str
    source: str = ""
    proved: bool | None = None
    """Whether an audit derives the same number again; None for a number that it does not derive."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class TokenStrip(Block):
    """Tokens of a call's prompt and answer, coloured by a measure. `texts` has the text of each; the first `prompt` of them
    belong to the prompt, the others were sampled. `why` is the derivation of the push, the same for all tokens of the answer.
    `prompt_left_out` counts the tokens of the prompt that come before the shown ones."""

    texts: Sequence[str]
    prompt: int
    measures: Sequence[Measure]
    why: Sequence[Reason] = ()
    prompt_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """The page of an address. `trail` links to the pages above it; `live` says that the page may still change (its run goes on,
    or a slow part is missing: then it is `partial`, too, and asked for again soon); `previous` and `next` are the addresses
    that the keys `[` and `]` open. `name` is the id of the shown thing, where the title is not: it stands below the title, to
    be copied. `waits` says that the page could not be made and is asked for again."""

    address: str
    title: str
    blocks: Sequence[Block]
    trail: Sequence[Link] = ()
    live: bool = False
    previous: str = ""
    next: str = ""
    name: str = ""
    waits: bool = False
    partial: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the page as the JSON that the browser's shell gets and that an export writes."""
        return {
            "address": self.address,
            "title": self.title,
            "name": self.name,
            "trail": [asdict(link) for link in self.trail],
            "live": self.live,
            "partial": self.partial,
            "waits": self.waits,
            "previous": self.previous,
            "next": self.next,
            "blocks": [block.to_json() for block in self.blocks],
        }


def with_whole_characters(value: Any) -> Any:
    """Return a JSON value in which half a surrogate pair is written as an escape such as `\\ud800`, in names and in texts."""
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
    """Encode a page (or any value of JSON) as UTF-8; an object of another type becomes its text. Raises `TypeError` for a
    number that JSON cannot express."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # rare: a check before would cost more than the encoding
        return orjson.dumps(
            with_whole_characters(value),
            default=lambda other: with_whole_characters(str(other)),
            option=orjson.OPT_NON_STR_KEYS,
        )
