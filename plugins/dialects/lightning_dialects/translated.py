"""The common base of the dialects that are translated to vLLM's chat completions.

The invariant: vLLM's own endpoints for these APIs return no token ids, so that the chat endpoint is called; the transition's id
is the one that the agent sees. A chat answer is split into a sequence of parts: reasoning, text and tool calls. A whole answer,
read as one delta, and a stream of the same content give the same parts, however the stream was cut. A closed part is never
opened again.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from lightning.bounded import Once
from lightning.config import GatewayConfig
from lightning.gateway.dialects import Chat, Plan, refuse_parameter, strip_reasoning
from lightning.gateway.http import Body, RefusalError, event_of, write_object

from lightning_dialects.config import HostedToolsConfig

log = logging.getLogger(__name__)


class Translated(Chat):
    """A dialect that asks vLLM for a chat completion and reads ids and logprobs from that."""

    def __init__(self, config: GatewayConfig) -> None:
        self._drops_hosted_tools = HostedToolsConfig.of(config).hosted_tools == "drop"
        self._said = Once()

    @abstractmethod
    def hosted_tools(self, body: Body) -> list[str]:
        """Return the types of a request's tools that a provider's servers would run. Raises `RefusalError` (422)."""

    @abstractmethod
    def without_hosted_tools(self, body: Body) -> Body:
        """Return the request without the tools of `hosted_tools`."""

    def runnable(self, body: Body) -> Body:
        """Return the request, without hosted tools if `gateway.hosted_tools` is "drop"; each dropped type is logged once."""
        types = self.hosted_tools(body) if self._drops_hosted_tools else []
        if not types:
            return body
        for kind in filter(self._said.first, sorted(types)):
            log.warning(
                "agents ask for the tool %r, which runs on a provider's servers: it is left out (gateway.hosted_tools), and "
                "the model never hears of it. Said once",
                kind,
            )
        return self.without_hosted_tools(body)

    def plan(self, body: Body) -> Plan:
        """Check a translated request and ask vLLM for ids and logprobs (in place). Raises `RefusalError` (422), also for more
        than one choice."""
        plan = super().plan(body)
        if plan.n != 1:
            raise refuse_parameter("n", "must be 1: an answer of this API is one. Send the request again instead.")
        return plan

    def strip(self, answer: Body, plan: Plan) -> bool:
        """Remove reasoning that the agent must not see, with its ids and logprobs, from an answer or a chunk; the translation
        takes over nothing else that was not asked for. Return whether anything was removed."""
        return strip_reasoning(answer, plan)

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """Return False: a chunk that vLLM sends only because ids were asked for translates to no event."""
        return False


def event(said: Body) -> bytes:
    """Encode a server-sent event whose name is its `type`."""
    return event_of(write_object(said), said["type"])


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turn errors while a request is read into a `RefusalError` (422), since a value of the wrong type is the agent's fault."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        message = f"Something in the request is not of the type that this API's reference gives it: {error}."
        raise RefusalError(422, "invalid_request", message) from error


def passed_on(asked: Body, without: frozenset[str], renamed: Mapping[str, str], refused: Mapping[str, str]) -> Body:
    """Return the parameters of a request that are passed to vLLM, as they are or under their `renamed` name; those in `without`
    and those that are None are dropped. Raises `RefusalError` (422) for a parameter in `refused`."""
    for name, why in refused.items():
        if asked.get(name):
            raise refuse_parameter(name, why)
    left_out = {*without, *renamed, *refused}
    said = {name: value for name, value in asked.items() if value is not None and name not in left_out}
    return said | {other: asked[name] for name, other in renamed.items() if asked.get(name) is not None}


def ask_for_stream(chat: Body, asked: Body) -> None:
    """Ask vLLM for a stream, with the usage at its end, if the agent asked for a stream. Raises `RefusalError` (422)."""
    stream = asked.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise refuse_parameter("stream", f"must be true or false, not {stream!r}.")
    if stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}


def object_field(asked: Body, name: str) -> Body:
    """Return an optional object of a request; empty if missing. Raises `RefusalError` (422) for another type."""
    value = asked.get(name) or {}
    if not isinstance(value, dict):
        raise refuse_parameter(name, f"must be an object, not {type(value).__name__}.")
    return value


def text_field(holder: Body, name: str, where: str) -> str:
    """Return a string that an item must have. Raises `RefusalError` (422) if it has none."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise refuse_parameter(f"{where}.{name}", f"must be a string, not {type(value).__name__}.")
    return value


def items_of(value: object, where: str) -> list[Body]:
    """Return a value that must be a list of objects. Raises `RefusalError` (422) if it is not."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise refuse_parameter(where, "must be a list of objects.")
    return value


class Kind(Enum):
    """The kinds of parts of an answer."""

    REASONING = auto()
    TEXT = auto()
    TOOL = auto()


class Step(Enum):
    """The steps of a part's life in a stream."""

    OPEN = auto()
    ADD = auto()
    CLOSE = auto()


@dataclass(slots=True, eq=False)
class Part:
    """A part of an answer: reasoning, text or a tool call. `index` is its place in the answer. `call_id` and `name` are those
    of a tool call, whose text is its arguments."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The part's text so far."""
        return "".join(self.pieces)


NO_ARGUMENTS = "{}"
Event = tuple[Step, Part, str]
"""A step, the part it concerns, and for `ADD` the piece that was added."""


class Parts:
    """Splits one answer into parts. Feed it the message of a whole answer, or each delta of a stream; then call `close`."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None
        self._call: object = None
        self._calls: set[object] = set()
        self._blank = ""

    def feed(self, said: Body) -> Iterator[Event]:
        """Yield the steps of one delta. Raises `ValueError` if it continues a tool call that has already ended."""
        if reasoning := said.get("reasoning") or said.get("reasoning_content"):
            yield from self._add(Kind.REASONING, reasoning)
        if text := said.get("content"):
            yield from self._text(text)
        for position, call in enumerate(said.get("tool_calls") or ()):
            yield from self._tool(call.get("index", position), call)

    def close(self, *, at_least_one: bool = True) -> Iterator[Event]:
        """End the open part. With `at_least_one`, an answer without parts gets an empty text, and waiting white space becomes a
        text unless there were tool calls. A tool call for which vLLM streamed no arguments gets `{}`, as in a whole answer."""
        if at_least_one and self._blank and not self._calls:
            yield from self._add(Kind.TEXT, self._blank)
        elif at_least_one and not self.all:
            yield from self._enter(Kind.TEXT)
        if (part := self._open) is not None:
            if part.kind is Kind.TOOL and not part.pieces:
                part.pieces.append(NO_ARGUMENTS)
                yield Step.ADD, part, NO_ARGUMENTS
            yield Step.CLOSE, part, ""
            self._open = None

    def _text(self, piece: str) -> Iterator[Event]:
        """Add text. White space at its beginning waits for other text, because only streams have it around tool calls.

        As a part of its own between two calls, it would split one answer into two messages when the agent sends it back.
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
        """Add a delta of a tool call. Some servers number every call 0, so that a new call is also recognised by its id and
        name."""
        part, function = self._open, call.get("function") or {}
        call_id, name = call.get("id") or "", function.get("name") or ""
        goes_on = part is not None and part.kind is Kind.TOOL and number == self._call
        begins = bool(call_id and name) and (part is None or call_id != part.call_id)
        if part is None or not goes_on or begins:
            if number in self._calls and not (goes_on and begins):
                raise ValueError(f"tool call {number} went on after it had ended")
            self._calls.add(number)
            self._call, self._blank = number, ""
            yield from self._enter(Kind.TOOL, call_id, name)
            part = self.all[-1]
        elif call_id and call_id != part.call_id:
            raise ValueError(f"tool call {number} went on as {call_id!r}, which nothing began")
        if piece := function.get("arguments"):
            part.pieces.append(piece)
            yield Step.ADD, part, piece

    def _enter(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Event]:
        part = Part(kind, len(self.all), call_id, name)
        self.all.append(part)  # before the open part ends: only the last part may count as cut off
        yield from self.close(at_least_one=False)
        self._open = part
        yield Step.OPEN, part, ""


class Translator(ABC):
    """Translates vLLM's answer to one call into the answer of the dialect.

    The invariant: a stream adds up to the whole answer. Before the chunk with the finish reason, `chunk` returns nothing that
    says that the answer is complete.
    """

    def __init__(self, answer_id: str) -> None:
        self._id, self._parts = answer_id, Parts()
        self._model, self._finish = "", ""
        self._usage: Body | None = None

    def whole(self, reply: Body) -> Body:
        """Return the dialect's object for a whole answer."""
        choice = reply["choices"][0]
        self._read(reply, choice)
        for _ in (*self._parts.feed(choice["message"]), *self._parts.close()):
            pass
        return self.answer()

    def chunk(self, chunk: Body) -> bytes:
        """Return the dialect's events for one chunk, possibly none."""
        choices = chunk.get("choices") or []
        self._read(chunk, choices[0] if choices else None)
        said = self._beginning(chunk)
        for choice in choices:
            for happened in self._parts.feed(choice.get("delta") or {}):
                said += self._events(happened)
        return self._written(said)

    def end(self) -> bytes:
        """Return the events that end a stream."""
        said = [body for happened in self._parts.close() for body in self._events(happened)]
        return self._written([*said, *self._ending()])

    @abstractmethod
    def broken(self, refusal: RefusalError) -> bytes:
        """Return the event that tells the agent that a stream broke off."""

    def conversation(self) -> list[Body] | None:
        """Return the chat messages up to and with a complete answer, which later requests may continue by its id; None if they
        may not."""
        return None

    def _read(self, answer: Body, choice: Body | None) -> None:
        """Note the model, the usage and the finish reason of an answer or a chunk."""
        self._model = answer.get("model") or self._model
        self._usage = answer.get("usage") or self._usage
        if choice is not None:
            self._finish = choice.get("finish_reason") or self._finish

    @abstractmethod
    def answer(self) -> Body:
        """Return the dialect's object for the whole answer, also for one that was read as a stream."""

    @abstractmethod
    def _beginning(self, chunk: Body) -> list[Body]:
        """Return the events before the first chunk's; none from the second chunk on."""

    @abstractmethod
    def _events(self, happened: Event) -> Iterator[Body]:
        """Yield the events for one step of a part."""

    @abstractmethod
    def _ending(self) -> list[Body]:
        """Return the events that end a stream after all of its parts have ended."""

    def _written(self, said: list[Body]) -> bytes:
        return b"".join(map(event, said))
