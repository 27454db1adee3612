"""The stored form of the messages that a response adds to its conversation, for later `previous_response_id` requests, and
which of them may be stored.

The invariant: `conversation_in` returns exactly what `pack` was given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from lightning.errors import StoreError
from lightning.redaction import may_be_redacted, redacted_json
from lightning.store.rows import as_list, dump
from lightning.types import Conversation, Json, Transition

CONVERSATION: Final = "conversation"
"""The name under which it is stored in a call's extras."""
MOST_TEXTS = 20_000
"""Most texts of a JSON value that may hold a credential; a value with more is left out, since searching them takes seconds."""


def pack(said: Conversation) -> bytes:
    """Encode what a response adds to its conversation, for the call's extras."""
    return dump([said.after, said.kept, *said.messages], "a conversation").encode()


def conversation_in(call: Transition) -> Conversation | None:
    """Read what a call's response adds to its conversation; None if it is not stored. Raises `StoreError` if it is corrupt."""
    packed = call.extras.get(CONVERSATION)
    if packed is None:
        return None
    what = f"the conversation of transition {call.key}"
    after, kept, *messages = [*as_list(packed.decode(errors="replace"), what), None, None]
    if not isinstance(after, str) or not isinstance(kept, int):
        raise StoreError(f"{what} is corrupt in the database. Restore the database from a backup")
    return Conversation(tuple(messages[:-2]), after, kept)


def storable(conversation: Conversation) -> Conversation | None:
    """Return the conversation, or None if redaction would change it: with changed words the model would continue a conversation
    that never was."""
    said = list(conversation.messages)
    if not may_be_redacted(json.dumps(said, ensure_ascii=False).encode(errors="replace")):
        return conversation
    return None if has_many_texts(said) or redacted_json(said, "conversation") != said else conversation


def has_many_texts(value: Json) -> bool:
    """Whether a JSON value has more than `MOST_TEXTS` texts, names among them."""
    left, count = [value], 0
    while left and count <= MOST_TEXTS:
        at = left.pop()
        if isinstance(at, str):
            count += 1
        elif isinstance(at, Mapping):
            count += len(at)
            left += at.values()
        elif isinstance(at, list | tuple):
            left += at
    return count > MOST_TEXTS
