"""The stored form of the messages that a response adds to its conversation, for later `previous_response_id` requests.

The invariant: `conversation_in` returns exactly what `pack` was given.
"""

from __future__ import annotations

from typing import Final

from lightning.errors import StoreError
from lightning.store.rows import as_list, dump
from lightning.types import Conversation, Transition

CONVERSATION: Final = "conversation"
"""The name under which it is stored in a call's extras."""


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
