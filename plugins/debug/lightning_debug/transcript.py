"""Transcripts for graders: the texts and tool calls of a recorded rollout's answers, and its tool runs.

The invariant: a transcript comes from the record alone. If a text is not recorded as it was, `missing` says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning.types import Rollout, Task, ToolEvent, Transition
from lightning_record import exchanges
from lightning_record.exchanges import Exchange, Parent

REDACTED: Final = "a credential was left out of its texts"
"""The reason for incomplete texts of a call if only a credential was removed from them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer, without its id. `arguments` are a mapping by name; if they are no JSON object, they are as
    sent."""

    name: str
    arguments: Any

    def __str__(self) -> str:
        given = self.arguments
        return f"{self.name}({given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)})"


@dataclass(frozen=True, slots=True)
class TranscriptCall:
    """One answered model call: the path of its `caller`, the `request` as the agent sent it (JSON), and the answer's `text` and
    `tool_calls`."""

    caller: str
    request: Mapping[str, Any]
    text: str
    tokens: int
    finish_reason: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """One recorded rollout with its answered calls and its tool runs. `missing` says why texts are not recorded whole; empty if
    they are."""

    rollout: Rollout
    calls: tuple[TranscriptCall, ...]
    tool_events: tuple[ToolEvent, ...]
    missing: str = ""

    @property
    def task(self) -> Task:
        """The rollout's task."""
        return self.rollout.task

    @property
    def answer(self) -> str:
        """The text of the last call; empty without one."""
        return self.calls[-1].text if self.calls else ""

    @property
    def ending(self) -> str:
        """The last answer and its tool calls as one text; empty without a call."""
        return " ".join(
            filter(None, [self.answer, *(str(made) for call in self.calls[-1:] for made in call.tool_calls)])
        )

    @property
    def tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(call.tokens for call in self.calls)


def transcript_of(
    rollout: Rollout,
    transitions: Sequence[Transition],
    tool_events: Sequence[ToolEvent],
    parent: Parent | None = None,
) -> Transcript:
    """Make the transcript of an attempt. `transitions` must be all its calls, refused ones included, because recorded texts may
    refer to other calls; a branch also needs its `parent` (`lightning_record.exchanges.parents_of`).

    Raises `StoreError` for calls whose texts cannot be read.
    """
    calls, missing = [], "" if transitions else "no call of it is stored"
    for transition, exchange in zip(transitions, exchanges.read(transitions, parent), strict=True):
        if transition.choice or not transition.status.answered:
            continue
        request: Mapping[str, Any] = {}
        if exchange is not None and isinstance(exchange.request, dict):
            request = exchange.request
        missing = missing or why_not_whole(exchange)
        reply = None if exchange is None else exchange.reply
        tokens, reason, made = len(transition.response_ids), transition.finish_reason, tool_calls_of(reply)
        calls.append(TranscriptCall(transition.caller.name, request, text_of(reply), tokens, reason, made))
    return Transcript(rollout, tuple(calls), tuple(tool_events), missing)


def why_not_whole(exchange: Exchange | None) -> str:
    """Return why the texts of a call are not recorded as they were; empty if they are."""
    if exchange is None:
        return "its requests and answers are not recorded"
    if exchange.too_large:
        return "a request or an answer of it was too large to be recorded"
    return REDACTED if exchange.redacted else ""


def text_of(reply: Any) -> str:
    """Return the text of an answer in any of the four APIs."""
    return "".join(said_in(item)[0] for item in _answered(reply))


def tool_calls_of(reply: Any) -> tuple[ToolCall, ...]:
    """Return the tool calls of an answer in any of the four APIs, in order."""
    return tuple(made for item in _answered(reply) for made in said_in(item)[1])


def _answered(reply: Any) -> list[Any]:
    """Return the messages or output items of an answer; of several choices only the first."""
    if not isinstance(reply, dict):
        return []
    if choices := reply.get("choices"):
        return [choices[0].get("message") or {"content": choices[0].get("text")}]
    return list(reply.get("output") or [reply])


def is_call(item: Mapping[str, Any]) -> bool:
    """Return whether an item of the Responses API, or a part of a message of the Messages API, is a tool call."""
    kind = str(item.get("type"))
    return bool(item.get("name")) and kind.endswith(("_call", "tool_use"))


def said_in(item: Any) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text and the tool calls of a model's message, or of an item of a response, in any of the four APIs."""
    if not isinstance(item, Mapping):
        return "", ()
    if is_call(item):
        return "", (_tool_call(item),)
    content = item.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, (list, tuple)) else []
    texts = [str(part.get("text", "")) for part in parts if part.get("type") in ("text", "output_text")]
    calls = [call for call in item.get("tool_calls") or () if isinstance(call, Mapping)] + list(filter(is_call, parts))
    return content if isinstance(content, str) else "".join(texts), tuple(map(_tool_call, calls))


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    made = call.get("function") or call.get("custom") or call
    arguments = made.get("arguments", made.get("input"))
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = arguments
    return ToolCall(str(made.get("name")), read if isinstance(read, dict) else arguments)


IDS: Final = ("id", "call_id", "tool_call_id", "tool_use_id", "previous_response_id")
"""Names of the fields that have ids in requests, messages and tool calls of the four APIs."""


def with_numbered_ids(item: Any, numbers: dict[str, str]) -> Any:
    """Replace the ids in a request or a message, and in its messages and tool calls, by numbers in order of appearance, because
    ids are random in each rollout. Arguments and outputs stay as they are. `numbers` has the numbers given so far, and gets the
    new ones."""
    if not isinstance(item, Mapping):
        return item
    found = dict(item)
    for name in IDS:
        if isinstance(given := item.get(name), str):
            found[name] = numbers.setdefault(given, f"id {len(numbers) + 1}")
    for name in ("messages", "input", "tool_calls", "content"):
        if isinstance(parts := item.get(name), (list, tuple)):
            found[name] = [with_numbered_ids(part, numbers) for part in parts]
    return found
