"""What the calls of an attempt said, as people read it: from the recorded exchanges, else from decoded token ids.

The invariant: `missing` says why a text is not the recorded one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.errors import StoreError
from lightning.store import exchanges
from lightning.store.exchanges import Exchange, Parent
from lightning.types import Transition
from lightning_debug.transcript import REDACTED, ToolCall, text_of, tool_calls_of, why_not_whole

from lightning_console.queries.tokens import Vocabulary


@dataclass(frozen=True, slots=True)
class Said:
    """One call. `request` is the JSON that was sent, empty where it is not recorded; `text` and `tool_calls` are of the answer.
    `reply` says that there is a recorded one."""

    request: Mapping[str, Any]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    path: str = ""
    missing: str = ""
    reply: bool = True

    @property
    def answer(self) -> str:
        """The answer with its tool calls, as a text."""
        return " ".join(filter(None, [self.text, *map(str, self.tool_calls)]))


def said_by(transitions: Sequence[Transition], vocabulary: Vocabulary, parent: Parent | None = None) -> list[Said]:
    """What each call of an attempt said, given all of its calls, and of a branch those of its `parent`. Exchanges that cannot
    be read are told by `missing`."""
    try:
        read, corrupt = exchanges.read(transitions, parent), ""
    except StoreError as error:
        read, corrupt = [None] * len(transitions), str(error)
    whole = {call.id: exchange for call, exchange in zip(transitions, read, strict=True) if exchange is not None}
    return [_said(call, whole.get(call.id), corrupt, vocabulary) for call in transitions]


def _said(call: Transition, exchange: Exchange | None, corrupt: str, vocabulary: Vocabulary) -> Said:
    missing = corrupt or why_not_whole(exchange)
    request = exchange.request if exchange is not None and isinstance(exchange.request, dict) else {}
    if exchange is not None and (not missing or missing == REDACTED) and exchange.reply is not None:
        reply = _choice(exchange.reply, call.choice)
        return Said(request, text_of(reply), tool_calls_of(reply), exchange.path, missing)
    text = vocabulary.text(call.response_ids) if len(call.response_ids) else ""
    missing = missing or ("" if call.status.answered else call.error or "the agent did not get this answer whole")
    return Said(request, text, path=exchange.path if exchange else "", missing=missing, reply=False)


def _choice(reply: Any, number: int) -> Any:
    """The reply with only one of its choices."""
    if number and isinstance(reply, dict) and len(choices := reply.get("choices") or ()) > number:
        return {**reply, "choices": [choices[number]]}
    return reply
