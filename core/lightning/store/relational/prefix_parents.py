"""Which earlier call a new one is stored against, and what is kept at hand of recent calls for that.

The invariant: a parent is a transition of the same or an earlier transaction with a smaller `n`, so chains of parents end;
what a rolled-back transaction remembered is forgotten.

The tokens of a short call are kept: to compare is ten times cheaper than to hash. Of a long call, digests of the blocks of its
tokens are kept: they say how many leading tokens a prompt shares with it, in a sixtieth of the space. Where a prompt leaves a
long call within a block, the tokens of that block are stored again. The next turn of a conversation and the siblings of a group
do not: the tokens around the end of a prompt and of a response are kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, TypeVar

from lightning.errors import StoreError
from lightning.store import codec
from lightning.store.rows import Row
from lightning.types import shared_prefix

CACHE_BYTES: Final = 64 << 20
"""4,000 conversations of 4,000 tokens each, or more than 20,000 of 32,000 tokens."""
CANDIDATES: Final = 32
"""Calls of an attempt, roots of a group, and calls up to one that is branched, that are remembered: the newest."""
LOADED_CALLS: Final = 8
"""The newest calls of an attempt, which are read when it is not at hand: the last ones of agents that take turns. Of one that
is branched, the newest up to that call."""
MIN_SHARED: Final = 0.5
"""A parent must hold this fraction of the prompt. A call without one is a root, and siblings of the group look at roots only:
were a few template tokens enough, the first call of a second agent would hang from the first agent's and not be found."""
_TOKEN: Final = codec.ITEM
_SHORT: Final = 4096 * _TOKEN
"""Bytes of the longest call that is kept as it is."""
_BLOCK: Final = 256 * _TOKEN
_DIGEST: Final = 16
"""Bytes: as long as it takes that nobody makes two blocks with one digest on purpose."""


def block_digests(packed: bytes) -> bytes:
    """The digests of the whole blocks of packed tokens, one behind the other."""
    ends = range(_BLOCK, len(packed) + 1, _BLOCK)
    return b"".join([hashlib.blake2b(packed[end - _BLOCK : end], digest_size=_DIGEST).digest() for end in ends])


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of the full tokens of a call (prompt + response, packed), of which there are `length` bytes.

    Of a short one: `whole`, the tokens. Of a long one: `blocks`, their `block_digests`, and `edges`, the packed tokens between
    the last whole block and the end of the prompt, and of the response, each with the number of blocks before it.
    """

    length: int
    whole: bytes = b""
    blocks: bytes = b""
    edges: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def of(cls, full: bytes, prompt_bytes: int) -> Fingerprint:
        """Of full tokens that begin with so many bytes of prompt."""
        if len(full) <= _SHORT:
            return cls(len(full), full)
        ends = (prompt_bytes, len(full))
        edges = tuple((end // _BLOCK, full[end - end % _BLOCK : end]) for end in ends)
        return cls(len(full), b"", block_digests(full), edges)

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes, with what it is remembered in."""
        return 400 + len(self.whole) + len(self.blocks) + sum(len(edge) for _, edge in self.edges)

    def shared(self, prompt: Prompt) -> int:
        """How many leading tokens it has in common with a prompt; fewer where the prompt leaves a long one within a block."""
        if self.length <= _SHORT:
            return shared_prefix(prompt.packed, self.whole, _TOKEN)
        same = shared_prefix(prompt.blocks, self.blocks, _DIGEST)
        within = 0
        for before, edge in self.edges:
            if before == same and edge:
                rest = prompt.packed[same * _BLOCK : (same + 1) * _BLOCK]
                within = max(within, shared_prefix(rest, edge, _TOKEN))
        return same * _BLOCK // _TOKEN + within

    def is_extended(self, shared: int) -> bool:
        """Whether a prompt that shares so many tokens begins with all of them."""
        return shared * _TOKEN == self.length


@dataclass(frozen=True)
class Prompt:
    """The packed tokens of a prompt that looks for a parent, and what is remembered of its call."""

    packed: bytes
    call: Fingerprint

    @cached_property
    def blocks(self) -> bytes:
        """The `block_digests` of the prompt, for a candidate of which no more is remembered."""
        blocks = self.call.blocks or block_digests(self.packed)
        return blocks[: len(self.packed) // _BLOCK * _DIGEST]


@dataclass(frozen=True, slots=True)
class KnownTransition:
    """Transition `n`, and the first `codec.HEAD_BYTES` of its blob: they tell it from another one that was given its number
    after it was pruned."""

    n: int
    head: bytes
    tokens: Fingerprint


class ParentCache:
    """Candidates for parents by attempt, by group and by branched call, oldest first; those of the least recently used ones are
    dropped first. Belongs to one thread."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._entries: OrderedDict[Hashable, list[KnownTransition]] = OrderedDict()
        self._touched: set[Hashable] = set()

    async def get(
        self, key: Hashable, load: Callable[[], Awaitable[Iterable[KnownTransition]]]
    ) -> list[KnownTransition]:
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

    def add(self, key: Hashable, known: KnownTransition, extended: KnownTransition | None = None) -> None:
        """Remember a new transition under a key that was asked for before, in place of the one whose full tokens its prompt
        begins with: whatever shares a prefix with that shares as much with the new one."""
        entry = self._entries.get(key)
        if entry is not None:
            self._add(key, entry, known, extended)

    def drop(self, key: Hashable) -> None:
        """Forget what is remembered under a key: some of it is not in the database any more."""
        self._drop(key)

    def _add(
        self,
        key: Hashable,
        entry: list[KnownTransition],
        known: KnownTransition,
        extended: KnownTransition | None = None,
    ) -> None:
        self._touched.add(key)
        entry.append(known)
        self._bytes += known.tokens.size
        gone = [extended] if extended in entry else []
        for old in gone + entry[: max(0, len(entry) - len(gone) - CANDIDATES)]:
            entry.remove(old)
            self._bytes -= old.tokens.size

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
        self._entries.clear()
        self._touched.clear()
        self._bytes = 0

    def _drop(self, key: Hashable) -> None:
        self._bytes -= sum(known.tokens.size for known in self._entries.pop(key, ()))


class Candidate(Protocol):
    """What may be a parent."""

    @property
    def tokens(self) -> Fingerprint:
        """Of its full tokens."""


C = TypeVar("C", bound=Candidate)


def choose(prompt: Prompt, candidates: Iterable[C]) -> tuple[C | None, int]:
    """The candidate that shares most of the prompt (the first such one), if it shares enough to be worth it, and how
    many tokens it shares."""
    best: C | None = None
    most = 0
    whole = len(prompt.packed) // _TOKEN
    for known in candidates:
        shared = known.tokens.shared(prompt)
        if shared > most:
            best, most = known, shared
            if shared == whole:
                break
    return (best, most) if most and most >= MIN_SHARED * whole else (None, 0)


class Decoder:
    """Decodes blobs whose parents are decoded first, each once. `fetch(n)` gives the row `(n, parent, tokens)` or None."""

    def __init__(self, fetch: Callable[[int], Awaitable[Row | None]]) -> None:
        self._fetch = fetch
        self._full: dict[int, bytes] = {}

    async def decode(self, n: int, parent: int | None, blob: bytes) -> codec.CallTokens:
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
