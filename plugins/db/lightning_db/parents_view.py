"""What one of several transactions sees of the recently written calls that a new one may be stored against.

The invariant: what a transaction has not committed is a parent for no other one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from lightning.store.codec import KnownTransition, Load, ParentCache

K = TypeVar("K")


class ParentsView(ParentCache[K]):
    """What one transaction sees of a `ParentCache`, while others use it beside it. What the transaction stored is a parent for
    the others only once it is published."""

    def __init__(self, shared: ParentCache[K]) -> None:
        super().__init__()
        self._shared = shared
        self._seen: dict[Hashable, list[KnownTransition[K]]] = {}
        self._added: list[tuple[Hashable, KnownTransition[K], KnownTransition[K] | None]] = []

    async def get(self, key: Hashable, load: Load[K]) -> list[KnownTransition[K]]:
        """See `ParentCache.get`. An attempt's and a group's are asked for before the transaction stores a call under the key:
        so what is loaded is committed. Those of a branched rollout may be this transaction's own; `Transaction.kept` asks
        whether they are there."""
        if key not in self._seen:
            self._seen[key] = list(await self._shared.get(key, load))
        return self._seen[key]

    def at_hand(self, key: Hashable) -> list[KnownTransition[K]]:
        """The candidates under a key that was asked for before; none under any other."""
        return self._seen.get(key, [])

    def add(self, key: Hashable, known: KnownTransition[K], extended: KnownTransition[K] | None = None) -> None:
        """See `ParentCache.add`."""
        if key in self._seen:
            if extended in self._seen[key]:
                self._seen[key].remove(extended)
            self._seen[key].append(known)
            self._added.append((key, known, extended))

    def drop(self, key: Hashable) -> None:
        """See `ParentCache.drop`. Loaded again by a later transaction: this one would see, and show, what it has not
        committed."""
        self._shared.drop(key)
        self._seen[key] = []

    def publish(self) -> None:
        """The transaction was committed."""
        for key, known, extended in self._added:
            self._shared.add(key, known, extended)
        self._shared.keep()
