"""The parents that one transaction may choose from, while others run beside it.

The invariant: what a transaction appended is a parent for the others only after it was committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable

from lightning.store.codec import KnownTransition, ParentCache


class TransactionParents:
    """A transaction's own view of the cache that all transactions of a process share."""

    def __init__(self, shared: ParentCache) -> None:
        self._shared = shared
        self._seen: dict[Hashable, list[KnownTransition]] = {}
        self._added: list[tuple[Hashable, KnownTransition, KnownTransition | None]] = []

    async def get(
        self, key: Hashable, load: Callable[[], Awaitable[Iterable[KnownTransition]]]
    ) -> list[KnownTransition]:
        """See `Parents.get`. An attempt's and a group's are asked for before the transaction appends under the key: so what is
        loaded is committed. Those of a branched rollout may be this transaction's own; `Transaction.kept` asks whether they are
        there."""
        if key not in self._seen:
            self._seen[key] = list(await self._shared.get(key, load))
        return self._seen[key]

    def add(self, key: Hashable, known: KnownTransition, extended: KnownTransition | None = None) -> None:
        """See `Parents.add`."""
        if key in self._seen:
            self._seen[key].append(known)
            self._added.append((key, known, extended))

    def drop(self, key: Hashable) -> None:
        """See `Parents.drop`. Loaded again by a later transaction: this one would see, and show, what it has not committed."""
        self._shared.drop(key)
        self._seen[key] = []

    def publish(self) -> None:
        """The transaction was committed."""
        for key, known, extended in self._added:
            self._shared.add(key, known, extended)
        self._shared.keep()
