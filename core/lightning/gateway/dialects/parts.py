"""A chat answer cut into what other dialects are made of: reasoning, text and tool calls, one after another.

The invariant: a whole answer, read as one delta, and a stream of the same content give the same parts, however the
stream was cut; a part that was closed is never opened again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from lightning.gateway.sampling import Body


class Kind(Enum):
    """What a part is."""

    REASONING = auto()
    TEXT = auto()
    TOOL = auto()


class Step(Enum):
    """What happens to a part."""

    OPEN = auto()
    ADD = auto()
    CLOSE = auto()


@dataclass(slots=True, eq=False)
class Part:
    """`index` is its place in the answer; `call_id` and `name` are a tool call's, whose text is its arguments."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


Event = tuple[Step, Part, str]
"""A step, the part it concerns, and for `ADD` the piece that was added."""


class Parts:
    """The parts of one answer. Feed it the message of a whole answer, or each delta; then `close`."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None
        self._call: object = None
        self._calls: set[object] = set()
        self._blank = ""

    def feed(self, said: Body) -> Iterator[Event]:
        """The steps one delta makes. Raises `ValueError` when it goes on with a tool call that another has followed."""
        if reasoning := said.get("reasoning") or said.get("reasoning_content"):
            yield from self._add(Kind.REASONING, reasoning)
        if text := said.get("content"):
            yield from self._text(text)
        for position, call in enumerate(said.get("tool_calls") or ()):
            yield from self._tool(call.get("index", position), call)

    def close(self, *, at_least_one: bool = True) -> Iterator[Event]:
        """End the part that is open; an answer without any has an empty text, and one without tool calls its white space."""
        if at_least_one and self._blank and not self._calls:
            yield from self._add(Kind.TEXT, self._blank)
        elif at_least_one and not self.all:
            yield from self._enter(Kind.TEXT)
        if self._open is not None:
            yield Step.CLOSE, self._open, ""
            self._open = None

    def _text(self, piece: str) -> Iterator[Event]:
        """White space waits for text to begin with it: before and between tool calls streams have it, whole answers not.

        Between two calls it would, as a part of its own, make two messages of one answer when the agent sends it back.
        """
        if self._open is None or self._open.kind is not Kind.TEXT:
            piece, self._blank = self._blank + piece, ""
            if not piece.strip():
                self._blank = piece
                return
        yield from self._add(Kind.TEXT, piece)

    def _add(self, kind: Kind, piece: str) -> Iterator[Event]:
        part = self._open
        if part is None or part.kind is not kind:
            yield from self._enter(kind)
            part = self.all[-1]
        part.pieces.append(piece)
        yield Step.ADD, part, piece

    def _tool(self, number: object, call: Body) -> Iterator[Event]:
        part, function = self._open, call.get("function") or {}
        if part is None or part.kind is not Kind.TOOL or number != self._call:
            if number in self._calls:
                raise ValueError(f"tool call {number} went on after it had ended")
            self._calls.add(number)
            self._call, self._blank = number, ""
            yield from self._enter(Kind.TOOL, call.get("id") or "", function.get("name") or "")
            part = self.all[-1]
        if piece := function.get("arguments"):
            part.pieces.append(piece)
            yield Step.ADD, part, piece

    def _enter(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Event]:
        yield from self.close(at_least_one=False)
        self._open = Part(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        yield Step.OPEN, self._open, ""
