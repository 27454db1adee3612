"""Which earlier call a new one is stored against, and the tokens of recent calls kept at hand for that.

The invariant: what is remembered here was acknowledged by Redis, and a script checks that a parent is still there, with the
digest it had, in the moment its child is written; so no child is ever without its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning.store.codec import CANDIDATES, Fingerprint

CACHE_BYTES: Final = 32 << 20
"""For each event loop that uses the store: usually one."""
GROUP_ROOTS: Final = 32
"""How many roots of a group are kept in mind."""

CallKey: TypeAlias = tuple[str, int, int]
"""Rollout, attempt and seq."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered of the tokens of a stored call, and the digest it is stored with."""

    key: CallKey
    digest: bytes
    tokens: Fingerprint


class ParentCache:
    """Candidates by attempt, group and branched call, least recently used ones dropped first. Belongs to one event loop."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Known, ...]] = OrderedDict()

    def get(self, key: Hashable) -> tuple[Known, ...] | None:
        """The candidates under a key, None when they were never loaded or have been dropped."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Hashable, candidates: Iterable[Known]) -> tuple[Known, ...]:
        """Remember candidates, oldest first, in place of those there were; return those that are remembered."""
        self.drop(key)
        entry = self._entries[key] = tuple(candidates)[-CANDIDATES:]
        self._bytes += sum(known.tokens.size for known in entry)
        while self._bytes > self._limit and len(self._entries) > 1:
            self.drop(next(iter(self._entries)))
        return entry

    def add(self, key: Hashable, known: Known, old: Known | None) -> None:
        """Remember a new call under a key whose candidates are at hand, see `extended`."""
        entry = self._entries.get(key)
        if entry is not None:
            self.put(key, extended(entry, known, old))

    def drop(self, key: Hashable) -> None:
        """Forget the candidates under a key."""
        self._bytes -= sum(known.tokens.size for known in self._entries.pop(key, ()))


def extended(candidates: tuple[Known, ...], known: Known, old: Known | None) -> tuple[Known, ...]:
    """Candidates with a new one, in place of the `old` one whose full tokens its prompt begins with: whatever shares a prefix
    with that shares as much with the new one."""
    return (*(candidate for candidate in candidates if candidate != old), known)
