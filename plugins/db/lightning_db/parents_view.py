"""The recently written calls that one of several transactions sees, as possible parents of the calls that it stores.

The invariant: a call that is not committed is a parent of no call of another transaction.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from lightning.store.codec import KnownTransition, Load, ParentCache

K = TypeVar("K")


class ParentsView(ParentCache[K]):
    """One transaction's view of a `ParentCache` that other transactions use at the same time. Calls that the transaction stored
    become parents for the others with `keep`, after its commit."""

    def __init__(self, shared: ParentCache[K]) -> None:
        super().__init__()
        self._shared = shared
        self._seen: dict[Hashable, list[KnownTransition[K]]] = {}
        self._added: list[tuple[Hashable, KnownTransition[K], KnownTransition[K] | None]] = []

    async def get(self, key: Hashable, load: Load[K]) -> list[KnownTransition[K]]:
        """Return the candidates under a key, as `ParentCache.get` does. Those of an attempt and of a group are loaded before
        the transaction stores a call under the key, so they are committed. Those of a branched rollout may be this
        transaction's own; `Transaction.kept` checks that they exist."""
        if key not in self._seen:
            self._seen[key] = list(await self._shared.get(key, load))
        return self._seen[key]

    def at_hand(self, key: Hashable) -> list[KnownTransition[K]]:
        """Return the candidates under a key that `get` has loaded; none for any other key."""
        return self._seen.get(key, [])

    def add(self, key: Hashable, known: KnownTransition[K], extended: KnownTransition[K] | None = None) -> None:
        """Add a call for this transaction alone (`ParentCache.add`)."""
        if key in self._seen:
            if extended in self._seen[key]:
                self._seen[key].remove(extended)
            self._seen[key].append(known)
            self._added.append((key, known, extended))

    def drop(self, key: Hashable) -> None:
        """Forget the candidates under a key (`ParentCache.drop`). Only a later transaction loads them again: this one would
        load its own calls, which are not committed, and share them."""
        self._shared.drop(key)
        self._seen[key] = []

    def keep(self) -> None:
        """Share the calls that the transaction stored; it was committed."""
        for key, known, extended in self._added:
            self._shared.add(key, known, extended)
        self._shared.keep()

    def forget(self) -> None:
        """Forget what the transaction saw and stored; it was rolled back."""
        self._seen.clear()
        self._added.clear()

    clear = forget
