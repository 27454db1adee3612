"""What of a rollout's record is given again: its calls, each once; answers with another text; and of a branch also the calls
that were answered from its parent's record.

The invariant: the calls stand in the order in which the agent made them. Those that a branch inherits come before its own, with
the ids and the answers that it was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning.batch.branches import Prefix, RecordedCall, RecordedRollout, meant_changes, prefix_of, read_rollout
from lightning.errors import DataError
from lightning.store.protocol import Store


class RecordedCalls:
    """The recorded calls that have not been asked for yet: each is given once, equal ones in their order."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        self._left: dict[tuple[str, bytes], list[RecordedCall]] = {}
        for call in calls:
            self._left.setdefault(call.key, []).append(call)

    def take(self, caller: str, path: str, request: bytes) -> RecordedCall | None:
        """The recorded call of this request: of the same caller if there is one, else the first; None without one."""
        same = self._left.get((path, request))
        if not same:
            return None
        found = next((call for call in same if call.caller == caller), same[0])
        same.remove(found)
        if not same:
            del self._left[path, request]
        return found

    @property
    def left(self) -> list[RecordedCall]:
        """Those that have not been asked for, in their order."""
        return sorted((call for calls in self._left.values() for call in calls), key=lambda call: call.number)


async def read_whole(
    store: Store, rollout: str, attempt: int | None = None, *, with_tools: bool = True
) -> RecordedRollout:
    """What the agent of a rollout asked and got, as `read_rollout` gives it. Tools that were answered in a branch are among its
    own already. Raises `DataError` for a rollout that cannot be replayed, or a branch whose parent cannot."""
    found = await store.get_rollout(rollout)
    if found is None or found.parent is None:
        return await read_rollout(store, rollout, attempt, with_tools=with_tools)
    own = await read_rollout(store, rollout, attempt, with_tools=with_tools, may_be_empty=True)
    parent, parents_attempt, seq = found.parent
    prefix = prefix_of(await read_rollout(store, parent, parents_attempt, with_tools=False), seq)
    calls: list[RecordedCall] = list(prefix.answered)
    if (edit := (await meant_changes(store, found)).edit) is not None:
        calls.append(edited(prefix.at, edit))
    calls += own.calls
    return replace(own, calls=tuple(replace(call, number=number) for number, call in enumerate(calls, 1)))


def live_tools(recorded: RecordedRollout, prefix: Prefix) -> list[str]:
    """The tools of a rollout that run again in a branch that begins so: those of frameworks, and all from the call on."""
    answered = {id(event) for event in prefix.tool_events if not event.call_id}
    return sorted({event.name for event in recorded.tool_events if id(event) not in answered and not event.kind})


def edited(call: RecordedCall, text: str) -> RecordedCall:
    """The call as if the model had said this text, and called no tool."""
    path, reply = call.exchange.path, call.exchange.reply
    if not isinstance(reply, dict):
        raise DataError(f"call {call.number} has no answer that could be edited")
    whole: dict[str, Any] = dict(reply)
    if path == "/messages":
        whole |= {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}
    elif path == "/responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": f"msg_{whole.get('id', '')}", "role": "assistant", "status": "completed"}
        whole |= {"output": [{**item, "content": [part]}]}
    else:
        chat = path == "/chat/completions"
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kept = {"index": 0, "finish_reason": "stop", "logprobs": None}
        whole |= {"choices": [{**kept, **said}]}
    return replace(call, exchange=replace(call.exchange, reply=whole))
