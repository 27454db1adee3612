"""What `previous_response_id` refers to: the chat messages up to the end of a response.

The invariant: an attempt sees its own responses only, and what is kept never exceeds a fixed number of bytes: the
responses used least recently go first. Nothing survives a restart, since an agent can always send its whole input.
"""

from __future__ import annotations

from collections import OrderedDict

from lightning.gateway.body import read_object, write_object
from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body

MOST_BYTES = 64 << 20

Key = tuple[str, int, str]
"""Rollout, attempt, response id."""


class History:
    """Conversations as JSON, least recently used first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._kept: OrderedDict[Key, bytes] = OrderedDict()
        self._bytes, self._most = 0, most_bytes

    def get(self, key: Key) -> list[Body]:
        """The messages. Raises `RefusalError` (404) for a response that is not known (any more)."""
        found = self._kept.get(key)
        if found is None:
            raise RefusalError(
                404,
                "previous_response_not_found",
                f"Response {key[2]!r} is not known: it was not made by this attempt, had 'store': false, was made before "
                "the gateway was restarted, or was too long ago. Send the whole conversation as input instead.",
                param="previous_response_id",
            )
        self._kept.move_to_end(key)
        messages: list[Body] = read_object(found)["messages"]
        return messages

    def put(self, key: Key, messages: list[Body]) -> None:
        """Remember a conversation."""
        said = write_object({"messages": messages})
        self._kept[key] = said
        self._bytes += len(said)
        while self._bytes > self._most:
            self._bytes -= len(self._kept.popitem(last=False)[1])
