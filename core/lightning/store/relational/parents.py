"""Which earlier call a new one is stored against, and the tokens of recent calls kept at hand for that.

The invariant: a parent is a transition of the same or an earlier transaction with a smaller `n`, so chains of parents end;
what a rolled-back transaction remembered is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from lightning.errors import StoreError
from lightning.store import codec
from lightning.store.rows import Row

CACHE_BYTES: Final = 128 << 20
MIN_SHARED: Final = 0.5
"""A parent must hold this fraction of the prompt. A call without one is a root, and siblings of the group look at roots only:
were a few template tokens enough, the first call of a second agent would hang from the first agent's and not be found."""


@dataclass(frozen=True, slots=True)
class Known:
    """The full tokens (prompt + response, packed) of transition `n`, and the first `codec.HEAD_BYTES` of its blob: they tell it
    from another one that was given its number after it was pruned."""

    n: int
    head: bytes
    full: bytes


class ParentCache:
    """Candidates for parents by attempt and by group, least recently used ones dropped first. Belongs to one thread."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._entries: OrderedDict[Hashable, list[Known]] = OrderedDict()
        self._touched: set[Hashable] = set()

    async def get(self, key: Hashable, load: Callable[[], Awaitable[Iterable[Known]]]) -> list[Known]:
        """The candidates under a key, loaded from the database if they are not at hand."""
        entry = self._entries.get(key)
        if entry is None:
            loaded = await load()
            entry = self._entries.get(key)  # another transaction may have loaded it meanwhile
            if entry is None:
                entry = self._entries[key] = []
                for known in loaded:
                    self._add(key, entry, known)
        self._entries.move_to_end(key)
        return entry

    def add(self, key: Hashable, known: Known) -> None:
        """Remember a new transition under a key that was asked for before.

        A candidate that the new one extends is dropped: whatever shares a prefix with it shares as much with the new one.
        """
        entry = self._entries.get(key)
        if entry is not None:
            self._add(key, entry, known)

    def drop(self, key: Hashable) -> None:
        """Forget what is remembered under a key: some of it is not in the database any more."""
        self._drop(key)

    def _add(self, key: Hashable, entry: list[Known], known: Known) -> None:
        self._touched.add(key)
        for old in [old for old in entry if known.full.startswith(old.full)]:
            entry.remove(old)
            self._bytes -= len(old.full)
        entry.append(known)
        self._bytes += len(known.full)

    def keep(self) -> None:
        """The transaction was committed: what it remembered is true. Drops what no longer fits."""
        self._touched.clear()
        while self._bytes > self._limit and self._entries:
            self._drop(next(iter(self._entries)))

    def forget(self) -> None:
        """Something was rolled back: drop whatever was touched since the last commit."""
        for key in self._touched:
            self._drop(key)
        self._touched.clear()

    def clear(self) -> None:
        """Drop everything: what was remembered may not be in the database any more."""
        for key in list(self._entries):
            self._drop(key)
        self._touched.clear()

    def _drop(self, key: Hashable) -> None:
        self._bytes -= sum(len(known.full) for known in self._entries.pop(key, ()))


class Candidate(Protocol):
    """What may be a parent."""

    @property
    def full(self) -> bytes:
        """Its packed full tokens."""


C = TypeVar("C", bound=Candidate)


def choose(prompt: bytes, candidates: Iterable[C]) -> C | None:
    """The candidate that shares most of the packed prompt (the first such one), if it shares enough to be worth it."""
    best: C | None = None
    most = 0
    whole = len(prompt) // 4
    for known in candidates:
        shared = codec.shared_prefix(prompt, known.full)
        if shared > most:
            best, most = known, shared
            if shared == whole:
                break
    return best if most and most >= MIN_SHARED * whole else None


class Decoder:
    """Decodes blobs whose parents are decoded first, each once. `fetch(n)` gives the row `(n, parent, tokens)` or None."""

    def __init__(self, fetch: Callable[[int], Awaitable[Row | None]]) -> None:
        self._fetch = fetch
        self._full: dict[int, bytes] = {}

    async def decode(self, n: int, parent: int | None, blob: bytes) -> codec.Tokens:
        """The tokens of transition `n`. Raises `StoreError` when it or one of its parents is damaged."""
        await self._resolve(n, parent)
        tokens = codec.decode(blob, self._full[parent] if parent is not None else b"")
        self._full[n] = codec.full_tokens(tokens)
        return tokens

    def full(self, n: int) -> bytes:
        """The packed full tokens of a transition that was decoded before."""
        return self._full[n]

    async def _resolve(self, child: int, parent: int | None) -> None:
        """Decode the chain of ancestors, oldest first: a long chain must not be a deep recursion."""
        chain: list[Row] = []
        while parent is not None and parent not in self._full:
            if parent >= child:
                raise StoreError(f"transition {child} names a later one, {parent}, as its parent: the row is corrupt")
            row = await self._fetch(parent)
            if row is None:
                raise StoreError(f"transition {parent}, the parent of {child}, is missing")
            chain.append(row)
            child, parent = parent, row[1]
        for n, above, blob in reversed(chain):
            tokens = codec.decode(blob, self._full[above] if above is not None else b"")
            self._full[n] = codec.full_tokens(tokens)
