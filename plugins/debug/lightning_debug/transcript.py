"""What a grader is given of a recorded rollout: the texts of its calls, and its tools.

The invariant: it is read from the record alone. Where a text is not recorded as it was, `missing` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning.store import exchanges
from lightning.store.exchanges import Exchange
from lightning.types import Rollout, Task, ToolEvent, Transition

REDACTED: Final = "a credential was left out of its texts"
"""Why the texts of a call are not whole where all of them but a credential is there."""


@dataclass(frozen=True, slots=True)
class TranscriptCall:
    """One answered model call: the path of its `caller`, the `request` as the agent sent it (JSON), and the answer's `text`."""

    caller: str
    request: Mapping[str, Any]
    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """One recorded rollout. `answer` is the text of its last call; `missing` says why texts are not recorded whole, empty where
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
    def tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(call.tokens for call in self.calls)


def transcript_of(rollout: Rollout, transitions: Sequence[Transition], tool_events: Sequence[ToolEvent]) -> Transcript:
    """The transcript of an attempt, from all of its rows, since answered calls may be packed against others.

    Raises `StoreError` for rows that cannot be read.
    """
    calls, missing = [], "" if transitions else "no call of it is stored"
    for transition, exchange in zip(transitions, exchanges.read(transitions), strict=True):
        if transition.choice or not transition.status.answered:
            continue
        request: Mapping[str, Any] = {}
        if exchange is not None and isinstance(exchange.request, dict):
            request = exchange.request
        missing = missing or why_not_whole(exchange)
        said = "" if exchange is None else text_of(exchange.reply)
        tokens = len(transition.response_ids)
        calls.append(TranscriptCall(transition.caller.name, request, said, tokens, transition.finish_reason))
    return Transcript(rollout, tuple(calls), tuple(tool_events), missing)


def why_not_whole(exchange: Exchange | None) -> str:
    """Why the texts of a call are not recorded as they were; empty where they are."""
    if exchange is None:
        return "its requests and answers are not recorded"
    if exchange.too_large:
        return "a request or an answer of it was too large to be recorded"
    return REDACTED if exchange.redacted else ""


def text_of(reply: Any) -> str:
    """The text of an answer of any of the four APIs."""
    if not isinstance(reply, dict):
        return ""
    if choices := reply.get("choices"):
        first = choices[0]
        return str((first.get("message") or {}).get("content") or first.get("text") or "")
    parts = list(reply.get("content") or ())
    for item in reply.get("output") or ():
        parts += item.get("content") or () if item.get("type") == "message" else ()
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") in ("text", "output_text"))
