"""What a call's response adds to the conversation that `previous_response_id` goes on with: an extra of the call.

The invariant: what `pack` wrote `conversation_in` reads back as it was.
"""

from __future__ import annotations

from typing import Final

from lightning.errors import StoreError
from lightning.store.rows import as_list, dump
from lightning.types import Conversation, Transition

CONVERSATION: Final = "conversation"
"""The extra's name."""


def pack(said: Conversation) -> bytes:
    """What a response adds to its conversation, as it is stored."""
    return dump([said.after, said.kept, *said.messages], "a conversation").encode()


def conversation_in(call: Transition) -> Conversation | None:
    """What a call's response adds to its conversation; None where that is not stored. Raises `StoreError` for what `pack` has
    not written."""
    packed = call.extras.get(CONVERSATION)
    if packed is None:
        return None
    what = f"the conversation of transition {call.key}"
    after, kept, *messages = [*as_list(packed.decode(errors="replace"), what), None, None]
    if not isinstance(after, str) or not isinstance(kept, int):
        raise StoreError(f"{what} is corrupt in the database. Restore the database from a backup")
    return Conversation(tuple(messages[:-2]), after, kept)
