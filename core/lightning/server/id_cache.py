"""What a view of a store has looked up already, so that it need not ask for each id again.

The invariant: everything is forgotten at once, a minute after the last time, so that what is concluded of something known is
no older than that either: a run may be pruned, and its id given to another.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

REMEMBERED = 16_384
"""Ids; beyond, the oldest are looked up again."""
FORGET_AFTER = 60.0
"""Seconds until all are looked up again."""


class KnownIds:
    """Ids known to be of one project; each kind of them is a name space."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._since = time.monotonic()

    def has(self, kind: str, identity: str) -> bool:
        """Whether this id is known."""
        now = time.monotonic()
        if now - self._since > FORGET_AFTER:
            self._ids.clear()
            self._since = now
        return (kind, identity) in self._ids

    def add(self, kind: str, identities: Iterable[str]) -> None:
        """These are of the project."""
        for identity in identities:
            self._ids[kind, identity] = None
            if len(self._ids) > REMEMBERED:
                self._ids.popitem(last=False)
