"""Encodes the token arrays of calls as small blobs and decodes them exactly, and chooses the earlier call, the parent, against
which a new call is stored.

The invariant: `decode` returns bit for bit what `encode` got (NaN payloads included), and a blob that was damaged, or that is
decoded against another parent than it was encoded with, raises `StoreError` instead of returning tokens.

Layout of a blob, all integers little-endian:

    byte 0       codec version, 3
    bytes 1-8    BLAKE2b-64 of the decoded content (see `content_digest`)
    bytes 9-28   how many tokens are shared with the parent, further prompt ids, response ids, log-probabilities, bytes of `low`
    rest         two zstandard frames without their magic number, `low` and `high`, of the further prompt ids and response ids
                 (int32) and the log-probabilities (float32); nothing when there are none

The parent of a call is an earlier call whose full tokens (prompt + response) begin as this prompt begins: the previous turn of
the same agent, or a sibling of the group with the same system prompt. Only what comes after the shared prefix is stored.
Numbers are stored as planes of bytes of equal place: `high` has the two highest bytes of the ids and the exponents of the
log-probabilities, which compress well, and `low` has the rest, which hardly does and would spoil the statistics of the others.

Decoded calls are differences, too: the prompts of calls that continue one another are views of one `Stem`. A digest ends with
the lengths, so that the digest of a call goes on from the prompt of its parent, and a conversation is hashed once.

A parent is a transition of the same or an earlier transaction with a smaller `n`, so every chain of parents ends. The cache of
possible parents forgets the calls of a transaction that was rolled back.

The cache keeps the tokens of a short call, because comparing is cheaper than hashing. Of a long call it keeps digests of the
blocks of its tokens, which tell how many leading tokens a prompt shares with the call and take less than a hundredth of the
space. If a prompt differs from a long call within a block, the tokens of that block are stored again. For the next turn of a
conversation and for the siblings of a group they are not: the cache also keeps the tokens around the ends of a prompt and of a
response.

Both kinds of hashes of a long prompt go on from the caller's last prompt, if that is still in memory and the new prompt begins
with its bytes. So of a turn of a conversation only the new tokens are hashed.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Generic, TypeAlias, TypeVar

import zstandard

from lightning.errors import DataError, StoreError
from lightning.installation import other_format
from lightning.store.rows import Row
from lightning.types import LogProbs, TokenIds, logprobs, shared_prefix, token_ids

K = TypeVar("K")
"""The type of the key by which a database finds a call."""
Packable: TypeAlias = "bytes | TokenIds | LogProbs"
"""Memory whose bytes are those of an array of numbers."""
VERSION: Final = 3
LENGTHS_FIRST: Final = 2
"""The codec that was written before `VERSION`. It is read, too; its digests begin with the lengths."""
LEVEL: Final = 3
FORMAT: Final = zstandard.FORMAT_ZSTD1_MAGICLESS
DIGEST_BYTES: Final = 8
"""The length of a content digest, which detects accidents, not forgeries. The SHA-256 digests of a `StepRecord` prove what a
step trained."""
HEAD_BYTES: Final = 1 + DIGEST_BYTES
"""How many bytes of a blob `stored_digest` reads."""
HEADER: Final = struct.Struct(f"<B{DIGEST_BYTES}s5I")
"""The header of a blob."""
ITEM: Final = 4
"""The bytes of one packed token id or log-probability."""
_LEAST_BLOCK: Final = 4
"""The bytes of the shortest block of a zstandard frame: one byte and the number of its repetitions."""
_MOST_OF_BLOCK: Final = 128 << 10
"""The most bytes to which a block can decompress."""


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The token arrays of a model call: the part of a transition that is worth compressing."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: LogProbs


@dataclass(frozen=True, slots=True)
class Packed:
    """`CallTokens` as little-endian bytes, with their `content_digest`. `blocks` are the `block_digests` of the prompt, or
    empty."""

    prompt: bytes
    response: bytes
    logprobs: bytes
    digest: bytes
    blocks: bytes = b""

    @property
    def full(self) -> bytes:
        """The packed prompt and response; a later call may share a prefix with them."""
        return self.prompt + self.response


class _Local(threading.local):
    """The zstandard contexts of a thread. They are not thread-safe, and making them costs more than one compression."""

    def __init__(self) -> None:
        # long matches only: in planes of few distinct bytes, short matches cost more than coding the bytes themselves
        parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, min_match=7, format=FORMAT)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(format=FORMAT)


_local = _Local()


def is_packable(values: object, formats: str) -> bool:
    """Whether a value is a token array of one of the formats, `i` or `f`."""
    return (
        isinstance(values, memoryview) and values.format in formats and values.itemsize == ITEM and values.c_contiguous
    )


def pack(values: TokenIds | LogProbs, formats: str = "if", what: str = "a token array") -> bytes:
    """Return the little-endian bytes of a token array. Raises `DataError`, which names it `what`, for an array of none of the
    `formats`."""
    if not is_packable(values, formats):
        raise DataError(
            f"{what} is a {type(values).__name__} of format {getattr(values, 'format', '-')}, and must be a contiguous "
            f"memoryview of format {' or '.join(formats)}: make it with lightning.types.token_ids() or logprobs()"
        )
    return bytes(_native(values))


def unpack_ids(data: bytes) -> TokenIds:
    """Return the token ids of little-endian int32 bytes."""
    return token_ids(bytes(_native(data)))


def unpack_logprobs(data: bytes) -> LogProbs:
    """Return the log-probabilities of little-endian float32 bytes."""
    return logprobs(bytes(_native(data)))


def full_tokens(tokens: CallTokens) -> bytes:
    """Return prompt and response as packed int32; a later call may share a prefix with them."""
    return pack(tokens.prompt_ids) + pack(tokens.response_ids)


class Stem:
    """Token ids that calls have in common: the prompt of each of them is a view of the first ids. What a view shows is never
    changed. `ids` has room for further ids behind the `used` ones."""

    def __init__(self, room: int = 0) -> None:
        self.ids, self.used = array("i", bytes(room * ITEM)), 0

    def continued(self, start: int, more: TokenIds) -> Stem:
        """Return a stem with the first `start` ids of this one, followed by `more`: this one if it has no other ids there, or
        else a copy."""
        stop = start + len(more)
        if not more:
            return self
        stem = self
        if start < self.used or stop > len(self.ids):
            stem = Stem(2 * stop if start else stop)
            stem.ids[:start] = self.ids[:start]
        memoryview(stem.ids)[start:stop] = more
        stem.used = stop
        return stem


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded call, the stem of which its prompt is a view, and the BLAKE2b-64 of its prompt."""

    tokens: CallTokens
    stem: Stem
    hashed: hashlib.blake2b


NO_PARENT: Final = Decoded(
    CallTokens(token_ids(), token_ids(), logprobs()), Stem(), hashlib.blake2b(digest_size=DIGEST_BYTES)
)
"""The parent of a call that is stored whole."""


def content_digest(prompt: hashlib.blake2b, size: int, response: bytes, logprobs: bytes) -> bytes:
    """Return the BLAKE2b-64 over three packed arrays and their lengths in bytes, given that of the prompt, which has `size`
    bytes."""
    hashed = prompt.copy()
    hashed.update(response)
    hashed.update(logprobs)
    hashed.update(struct.pack("<3Q", size, len(response), len(logprobs)))
    return hashed.digest()


def stored_digest(blob: bytes) -> bytes:
    """Return the content digest that a blob states, without decoding the blob. The blob's first `HEAD_BYTES` bytes are enough.
    Raises `StoreError` for an empty blob, and for a blob of another codec."""
    if not blob:
        raise StoreError("token blob is corrupt: it is empty")
    if blob[0] not in (VERSION, LENGTHS_FIRST):
        raise StoreError(other_format(f"token blob is corrupt, or of codec {blob[0]}", f"codec {VERSION}"))
    return bytes(blob[1:HEAD_BYTES])


def pack_tokens(tokens: CallTokens, late: LatePrompts | None = None, who: Hashable = None) -> Packed:
    """Return tokens packed, with their digest: the part of the encoding that does not depend on a parent. With `late`, a long
    prompt of the caller `who` is hashed from the end of the caller's last prompt on, if it begins with that. Raises `DataError`
    for arrays of other types than `CallTokens` names."""
    prompt, response = pack(tokens.prompt_ids, "i", "prompt_ids"), pack(tokens.response_ids, "i", "response_ids")
    logprobs = pack(tokens.logprobs, "f", "logprobs")
    if late is None or len(prompt) <= _SHORT:
        hashed, blocks = hashlib.blake2b(prompt, digest_size=DIGEST_BYTES), b""
    else:
        hashed, blocks = late.hashed(who, prompt)
    return Packed(prompt, response, logprobs, content_digest(hashed, len(prompt), response, logprobs), blocks)


def encode(packed: Packed, shared: int) -> bytes:
    """Return the blob of packed tokens, for a parent whose full tokens begin with the first `shared` ids of the prompt."""
    rest = packed.prompt[shared * ITEM :]
    planes = _to_planes(rest + packed.response, packed.logprobs)
    low, high = (_local.compressor.compress(plane) if plane else b"" for plane in planes)
    lengths = (len(part) // ITEM for part in (rest, packed.response, packed.logprobs))
    return HEADER.pack(VERSION, packed.digest, shared, *lengths, len(low)) + low + high


def decode(blob: bytes, parent: Decoded = NO_PARENT) -> Decoded:
    """Return the tokens of a blob that was encoded against `parent`.

    Raises `StoreError` if the blob is damaged, is of another codec, or was encoded against another parent.
    """
    digest = stored_digest(blob)
    if len(blob) < HEADER.size:
        raise StoreError("token blob is corrupt: its header is cut off")
    _, _, shared, n_rest, n_response, n_logprobs, n_low = HEADER.unpack_from(blob)
    begun, said = len(parent.tokens.prompt_ids), parent.tokens.response_ids
    if shared > begun + len(said):
        raise StoreError("token blob is corrupt: it shares more tokens with its parent than the parent has")
    n_ids = n_rest + n_response
    low = _decompress(blob[HEADER.size : HEADER.size + n_low], 2 * n_ids + 3 * n_logprobs)
    high = _decompress(blob[HEADER.size + n_low :], 2 * n_ids + n_logprobs)
    ids, logprobs = _from_planes(low, high, n_ids, n_logprobs)
    rest, response, start = ids[: n_rest * ITEM], ids[n_rest * ITEM :], min(shared, begun)
    stem = parent.stem.continued(start, said[: shared - start]).continued(shared, unpack_ids(rest))
    tokens = CallTokens(
        memoryview(stem.ids)[: shared + n_rest].toreadonly(), unpack_ids(response), unpack_logprobs(logprobs)
    )
    known = (
        parent if shared >= begun else NO_PARENT
    )  # a prompt that leaves its parent's within is hashed from its beginning
    hashed = known.hashed.copy()
    hashed.update(_native(tokens.prompt_ids[len(known.tokens.prompt_ids) :]))
    size = ITEM * len(tokens.prompt_ids)
    content = content_digest(hashed, size, response, logprobs)
    if blob[0] == LENGTHS_FIRST:
        lengths = struct.pack("<3Q", size, len(response), len(logprobs))
        whole = b"".join((lengths, pack(tokens.prompt_ids), response, logprobs))
        content = hashlib.blake2b(whole, digest_size=DIGEST_BYTES).digest()
    if content != digest:
        raise StoreError("token blob is corrupt: its content does not match its checksum")
    return Decoded(tokens, stem, hashed)


def _native(data: Packable) -> Packable:
    """Convert packed numbers between little-endian and this machine's byte order, in either direction."""
    if sys.byteorder == "little":
        return data
    swapped = array("i", bytes(data))
    swapped.byteswap()
    return swapped.tobytes()


def _decompress(frame: bytes, size: int) -> bytes:
    """Decompress a frame to exactly `size` bytes. The size is checked first, so that a damaged frame cannot take all memory.
    Raises `StoreError` for a damaged frame."""
    if not size:
        if frame:
            raise StoreError("token blob is corrupt: it has more than its header says")
        return b""
    if size > _MOST_OF_BLOCK * (len(frame) // _LEAST_BLOCK + 1):
        raise StoreError("token blob is corrupt: no frame of its length can hold what its header says")
    try:
        if zstandard.get_frame_parameters(frame, FORMAT).content_size != size:
            raise StoreError("token blob is corrupt: its header and its compressed frame disagree about the size")
        payload = _local.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StoreError(f"token blob is corrupt: {error}") from error
    if len(payload) != size:
        raise StoreError("token blob is corrupt: it decompresses to the wrong size")
    return payload


def _to_planes(ids: bytes, logprobs: bytes) -> tuple[bytes, bytes]:
    """Return the planes `low` and `high` of packed ids and log-probabilities, which the module describes."""
    low = (ids[0::ITEM], ids[1::ITEM], logprobs[0::ITEM], logprobs[1::ITEM], logprobs[2::ITEM])
    high = (ids[2::ITEM], ids[3::ITEM], logprobs[3::ITEM])
    return b"".join(low), b"".join(high)


def _from_planes(low: bytes, high: bytes, n_ids: int, n_logprobs: int) -> tuple[bytes, bytes]:
    ids, logprobs = bytearray(n_ids * ITEM), bytearray(n_logprobs * ITEM)
    ids[0::ITEM], ids[1::ITEM] = low[:n_ids], low[n_ids : 2 * n_ids]
    ids[2::ITEM], ids[3::ITEM] = high[:n_ids], high[n_ids : 2 * n_ids]
    for byte in range(3):
        start = 2 * n_ids + byte * n_logprobs
        logprobs[byte::ITEM] = low[start : start + n_logprobs]
    logprobs[3::ITEM] = high[2 * n_ids :]
    return bytes(ids), bytes(logprobs)


CACHE_BYTES: Final = 64 << 20
"""The size of the cache of possible parents: 4,000 conversations of 4,000 tokens, or more than 20,000 of 32,000 tokens."""
LATE_BYTES: Final = 32 << 20
"""The most bytes of the prompts of late calls: those of 128 callers with 64,000 tokens each."""
CANDIDATES: Final = 32
"""The most calls that the cache keeps of an attempt, of a group's roots, and of the calls up to a branched call. It keeps the
newest."""
LOADED_CALLS: Final = 8
"""The number of calls of an attempt that are read if the cache does not have the attempt. They are the newest, so the last
calls of agents that take turns are among them. Of a branched attempt they are the newest up to the branched call."""
MIN_SHARED: Final = 0.5
"""The fraction of its prompt that a call must share with another call to have it as its parent. A call without a parent is a
root, and calls of other rollouts of the group look for parents among the roots only. If a few tokens of the template were
enough, the first call of a second agent would have the first agent's call as its parent, and the siblings would not find it."""
_SHORT: Final = 4096 * ITEM
"""The most bytes of full tokens that the cache keeps as they are."""
_BLOCK: Final = 256 * ITEM
_DIGEST: Final = 8
"""The bytes of a block's digest."""
_SALT: Final = secrets.token_bytes(16)


def block_digests(packed: bytes, known: bytes = b"") -> bytes:
    """Return the digests of the whole blocks of packed tokens, joined: Python's hashes, which take a quarter of the time of
    BLAKE2b. `known` are the digests of the first blocks. The salt is new in each process, also with PYTHONHASHSEED, so that
    nobody makes two blocks with one digest on purpose."""
    first = len(known) // _DIGEST * _BLOCK
    blocks = (_SALT + packed[end - _BLOCK : end] for end in range(first + _BLOCK, len(packed) + 1, _BLOCK))
    return known + array("q", map(hash, blocks)).tobytes()


class LatePrompts:
    """The packed prompts of late calls with their BLAKE2b-64 and their `block_digests`, so that a prompt that continues one of
    them is hashed from its end on. It keeps the last prompt of each caller, of at most `limit` bytes together, and forgets the
    least recent ones. Its methods may be called from any thread."""

    def __init__(self, limit: int = LATE_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._known: OrderedDict[Hashable, tuple[bytes, hashlib.blake2b, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def hashed(self, who: Hashable, prompt: bytes) -> tuple[hashlib.blake2b, bytes]:
        """Return the BLAKE2b-64 and the `block_digests` of a prompt of the caller `who`, and keep them. The BLAKE2b must be
        copied before it is updated."""
        with self._lock:
            before = self._known.pop(who, None)
            self._bytes -= 0 if before is None else len(before[0])
        if before is None or not prompt.startswith(before[0]):
            hashed, blocks = hashlib.blake2b(prompt, digest_size=DIGEST_BYTES), block_digests(prompt)
        else:
            hashed, blocks = before[1].copy(), block_digests(prompt, before[2])
            hashed.update(memoryview(prompt)[len(before[0]) :])
        with self._lock:
            self._bytes += len(prompt) - len(self._known.pop(who, (b"",))[0])
            self._known[who] = prompt, hashed, blocks
            while self._bytes > self._limit:
                self._bytes -= len(self._known.popitem(last=False)[1][0])
        return hashed, blocks


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The full tokens of a call (prompt and response, packed, `length` bytes) as the cache keeps them.

    Of a short call it has the tokens, in `whole`. Of a long call it has `blocks`, the `block_digests`, and `edges`: the packed
    tokens between the last whole block and the end of the prompt, and those at the end of the response, each with the number of
    blocks before them.
    """

    length: int
    whole: bytes = b""
    blocks: bytes = b""
    edges: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def of(cls, full: bytes, prompt_bytes: int, blocks: bytes = b"") -> Fingerprint:
        """Make the fingerprint of full tokens whose first `prompt_bytes` bytes are the prompt. `blocks` are the `block_digests`
        of the prompt; empty if they are not known."""
        if len(full) <= _SHORT:
            return cls(len(full), full)
        ends = (prompt_bytes, len(full))
        edges = tuple((end // _BLOCK, full[end - end % _BLOCK : end]) for end in ends)
        return cls(len(full), b"", block_digests(full, blocks), edges)

    @property
    def size(self) -> int:
        """The approximate bytes of memory that the fingerprint takes in the cache."""
        return 400 + len(self.whole) + len(self.blocks) + sum(len(edge) for _, edge in self.edges)

    def shared(self, prompt: Prompt) -> int:
        """Return how many leading tokens the call shares with a prompt; fewer if the prompt differs from a long call within a
        block."""
        if self.length <= _SHORT:
            return shared_prefix(prompt.packed, self.whole, ITEM)
        same = shared_prefix(prompt.blocks, self.blocks, _DIGEST)
        within = 0
        for before, edge in self.edges:
            if before == same and edge:
                rest = prompt.packed[same * _BLOCK : (same + 1) * _BLOCK]
                within = max(within, shared_prefix(rest, edge, ITEM))
        return same * _BLOCK // ITEM + within


@dataclass(frozen=True)
class Prompt:
    """The packed tokens of a prompt that needs a parent, and the fingerprint of its call."""

    packed: bytes
    call: Fingerprint

    @cached_property
    def blocks(self) -> bytes:
        """The `block_digests` of the prompt, to compare it with long calls."""
        blocks = self.call.blocks or block_digests(self.packed)
        return blocks[: len(self.packed) // _BLOCK * _DIGEST]


@dataclass(frozen=True, slots=True)
class KnownTransition(Generic[K]):
    """A stored call as the cache keeps it: its `key` in the database, the first bytes of its blob (`head`), and its tokens. The
    head distinguishes the call from a later call that got the same key after this call was pruned."""

    key: K
    head: bytes
    tokens: Fingerprint


Load: TypeAlias = Callable[[], Awaitable[Iterable[KnownTransition[K]]]]
"""Reads possible parents from the database, oldest first."""


class ParentCache(Generic[K]):
    """A cache of possible parents by attempt, by group and by branched call, oldest first. It drops the least recently used
    keys when it is full. It belongs to one thread."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._entries: OrderedDict[Hashable, list[KnownTransition[K]]] = OrderedDict()
        self._touched: set[Hashable] = set()

    async def get(self, key: Hashable, load: Load[K]) -> list[KnownTransition[K]]:
        """Return the possible parents under a key, loaded with `load` if the cache does not have the key."""
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

    def add(self, key: Hashable, known: KnownTransition[K], extended: KnownTransition[K] | None = None) -> None:
        """Add a new transition under a key that the cache has, in place of the call `extended`, whose full tokens begin the new
        prompt: a later prompt shares as much with the new call."""
        entry = self._entries.get(key)
        if entry is not None:
            self._add(key, entry, known, extended)

    def drop(self, key: Hashable) -> None:
        """Forget a key, because some of its calls are no longer in the database or because the cache is full."""
        self._bytes -= sum(known.tokens.size for known in self._entries.pop(key, ()))

    def _add(
        self,
        key: Hashable,
        entry: list[KnownTransition[K]],
        known: KnownTransition[K],
        extended: KnownTransition[K] | None = None,
    ) -> None:
        self._touched.add(key)
        entry.append(known)
        self._bytes += known.tokens.size
        gone = [extended] if extended in entry else []
        for old in gone + entry[: max(0, len(entry) - len(gone) - CANDIDATES)]:
            entry.remove(old)
            self._bytes -= old.tokens.size

    def keep(self) -> None:
        """Keep the calls that a committed transaction added, and drop the least recently used keys if the cache is full."""
        self._touched.clear()
        while self._bytes > self._limit and self._entries:
            self.drop(next(iter(self._entries)))

    def forget(self) -> None:
        """Forget the keys that were changed since the last commit, because a transaction was rolled back."""
        for key in self._touched:
            self.drop(key)
        self._touched.clear()

    def clear(self) -> None:
        """Forget everything, because the database may have lost calls."""
        self._entries.clear()
        self._touched.clear()
        self._bytes = 0


def choose(prompt: Prompt, candidates: Iterable[KnownTransition[K]]) -> tuple[KnownTransition[K] | None, int]:
    """Return the candidate that shares the most tokens with a prompt (of several, the first), and the number of shared tokens.
    Return None and 0 if this number is less than `MIN_SHARED` of the prompt."""
    best: KnownTransition[K] | None = None
    most = 0
    whole = len(prompt.packed) // ITEM
    for known in candidates:
        shared = known.tokens.shared(prompt)
        if shared > most:
            best, most = known, shared
            if shared == whole:
                break
    return (best, most) if most and most >= MIN_SHARED * whole else (None, 0)


class Decoder:
    """Decodes blobs. It decodes their parents first, each once. `fetch(n)` returns the row `(n, parent, tokens)`, or None."""

    def __init__(self, fetch: Callable[[int], Awaitable[Row | None]]) -> None:
        self._fetch = fetch
        self._known: dict[int, Decoded] = {}

    async def decode(self, n: int, parent: int | None, blob: bytes) -> CallTokens:
        """Return the tokens of transition `n`, a row of the database. Raises `StoreError` when the row or one of its parents is
        damaged."""
        chain: list[Row] = [
            (n, parent, blob)
        ]  # with the ancestors, decoded from the oldest on: no recursion, which may be deep
        child = n
        while parent is not None and parent not in self._known:
            if parent >= child:
                raise StoreError(f"transition {child} names a later one, {parent}, as its parent: the row is corrupt")
            row = await self._fetch(parent)
            if row is None:
                raise StoreError(f"transition {parent}, the parent of {child}, is missing")
            chain.append(row)
            child, parent = parent, row[1]
        for known, above, stored in reversed(chain):
            self._known[known] = decode(stored, NO_PARENT if above is None else self._known[above])
        return self._known[n].tokens
