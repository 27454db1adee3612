"""Encodes the token arrays of calls as small blobs and decodes them exactly, and chooses the earlier call, the parent, against
which a new call is stored.

The invariant: `decode(encode(x, parent), parent) == x` bit for bit (NaN payloads included), and a blob that was damaged, or
that is decoded against another parent than it was encoded with, raises `StoreError` instead of returning tokens.

Layout of a blob, all integers little-endian:

    byte 0       codec version, 2
    bytes 1-8    BLAKE2b-64 of the decoded content (see `content_digest`)
    bytes 9-28   how many tokens are shared with the parent, further prompt ids, response ids, log-probabilities, bytes of `low`
    rest         two zstandard frames without their magic number, `low` and `high`, of the further prompt ids and response ids
                 (int32) and the log-probabilities (float32); nothing when there are none

The parent of a call is an earlier call whose full tokens (prompt + response) begin as this prompt begins: the previous turn of
the same agent, or a sibling of the group with the same system prompt. Only what comes after the shared prefix is stored.
Numbers are stored as planes of bytes of equal place: `high` has the two highest bytes of the ids and the exponents of the
log-probabilities, which compress well, and `low` has the rest, which hardly does and would spoil the statistics of the others.

A parent is a transition of the same or an earlier transaction with a smaller `n`, so every chain of parents ends. The cache of
possible parents forgets the calls of a transaction that was rolled back.

The cache keeps the tokens of a short call, because comparing is cheaper than hashing. Of a long call it keeps digests of the
blocks of its tokens, which tell how many leading tokens a prompt shares with the call and take less than a hundredth of the
space. If a prompt differs from a long call within a block, the tokens of that block are stored again. For the next turn of a
conversation and for the siblings of a group they are not: the cache also keeps the tokens around the ends of a prompt and of a
response.
"""

from __future__ import annotations

import hashlib
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
from lightning.types import LogProbs, TokenIds, shared_prefix

K = TypeVar("K")
"""The type of the key by which a database finds a call."""
VERSION: Final = 2
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
    """`CallTokens` as little-endian bytes, with their `content_digest`."""

    prompt: bytes
    response: bytes
    logprobs: bytes
    digest: bytes

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


def _type_of(values: object) -> str:
    return f"array({values.typecode!r})" if isinstance(values, array) else type(values).__name__


def pack(values: TokenIds | LogProbs) -> bytes:
    """Return the little-endian bytes of an `array('i')` or `array('f')`. Raises `DataError` for anything else."""
    if not isinstance(values, array) or values.typecode not in "if" or values.itemsize != ITEM:
        raise DataError(
            f"expected array('i') of token ids or array('f') of log-probabilities, got {_type_of(values)}: "
            "build it with lightning.types.token_ids() or logprobs()"
        )
    return _native(values.tobytes())


def unpack_ids(data: bytes) -> TokenIds:
    """Return an `array('i')` of little-endian int32 bytes."""
    values = array("i")
    values.frombytes(_native(data))
    return values


def unpack_logprobs(data: bytes) -> LogProbs:
    """Return an `array('f')` of little-endian float32 bytes."""
    values = array("f")
    values.frombytes(_native(data))
    return values


def full_tokens(tokens: CallTokens) -> bytes:
    """Return prompt and response as packed int32; a later call may share a prefix with them."""
    return pack(tokens.prompt_ids) + pack(tokens.response_ids)


def content_digest(prompt: bytes, response: bytes, logprobs: bytes) -> bytes:
    """Return the BLAKE2b-64 over the lengths of the three packed arrays and the arrays themselves."""
    digest = hashlib.blake2b(struct.pack("<3Q", len(prompt), len(response), len(logprobs)), digest_size=DIGEST_BYTES)
    for part in (prompt, response, logprobs):
        digest.update(part)
    return digest.digest()


def stored_digest(blob: bytes) -> bytes:
    """Return the content digest that a blob states, without decoding the blob. The blob's first `HEAD_BYTES` bytes are enough.
    Raises `StoreError` for an empty blob, and for a blob of another codec."""
    if not blob:
        raise StoreError("token blob is corrupt: it is empty")
    if blob[0] != VERSION:
        raise StoreError(other_format(f"token blob is corrupt, or of codec {blob[0]}", f"codec {VERSION}"))
    return bytes(blob[1:HEAD_BYTES])


def pack_tokens(tokens: CallTokens) -> Packed:
    """Return tokens packed, with their digest: the part of the encoding that does not depend on a parent. Raises `DataError`
    for arrays of other types than `CallTokens` names."""
    for name, values, code, maker in (
        ("prompt_ids", tokens.prompt_ids, "i", "token_ids"),
        ("response_ids", tokens.response_ids, "i", "token_ids"),
        ("logprobs", tokens.logprobs, "f", "logprobs"),
    ):
        if not isinstance(values, array) or values.typecode != code:
            raise DataError(
                f"{name} has the type {_type_of(values)}, and must be array({code!r}): make it with lightning.types.{maker}()"
            )
    prompt, response, logprobs = pack(tokens.prompt_ids), pack(tokens.response_ids), pack(tokens.logprobs)
    return Packed(prompt, response, logprobs, content_digest(prompt, response, logprobs))


def encode(tokens: CallTokens, parent: bytes = b"") -> bytes:
    """Encode tokens against the packed full tokens of a parent; empty bytes mean that there is no parent. Raises `DataError`
    for arrays of other types than `CallTokens` names."""
    packed = pack_tokens(tokens)
    return encode_packed(packed, shared_prefix(packed.prompt, parent, ITEM))


def encode_packed(packed: Packed, shared: int) -> bytes:
    """Return the blob of packed tokens, for a parent whose full tokens begin with the first `shared` ids of the prompt."""
    rest = packed.prompt[shared * ITEM :]
    planes = _to_planes(rest + packed.response, packed.logprobs)
    low, high = (_local.compressor.compress(plane) if plane else b"" for plane in planes)
    lengths = (len(part) // ITEM for part in (rest, packed.response, packed.logprobs))
    return HEADER.pack(VERSION, packed.digest, shared, *lengths, len(low)) + low + high


def decode(blob: bytes, parent: bytes = b"") -> CallTokens:
    """Return the tokens of a blob. `parent` are the packed full tokens of the parent against which the blob was encoded.

    Raises `StoreError` if the blob is damaged, is of another codec, or was encoded against another parent.
    """
    digest = stored_digest(blob)
    if len(blob) < HEADER.size:
        raise StoreError("token blob is corrupt: its header is cut off")
    _, _, shared, n_rest, n_response, n_logprobs, n_low = HEADER.unpack_from(blob)
    if shared * ITEM > len(parent):
        raise StoreError("token blob is corrupt: it shares more tokens with its parent than the parent has")
    n_ids = n_rest + n_response
    low = _decompress(blob[HEADER.size : HEADER.size + n_low], 2 * n_ids + 3 * n_logprobs)
    high = _decompress(blob[HEADER.size + n_low :], 2 * n_ids + n_logprobs)
    ids, logprobs = _from_planes(low, high, n_ids, n_logprobs)
    prompt, response = parent[: shared * ITEM] + ids[: n_rest * ITEM], ids[n_rest * ITEM :]
    if content_digest(prompt, response, logprobs) != digest:
        raise StoreError("token blob is corrupt: its content does not match its checksum")
    return CallTokens(unpack_ids(prompt), unpack_ids(response), unpack_logprobs(logprobs))


def _native(data: bytes) -> bytes:
    """Convert packed numbers between little-endian and this machine's byte order, in either direction."""
    if sys.byteorder == "little":
        return data
    return b"".join(data[at : at + ITEM][::-1] for at in range(0, len(data), ITEM))


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


def block_digests(packed: bytes) -> bytes:
    """Return the digests of the whole blocks of packed tokens, joined: Python's hashes, whose key is new in
    each process, so that nobody makes two blocks with one digest on purpose. They take a quarter of the time of BLAKE2b."""
    blocks = (packed[end - _BLOCK : end] for end in range(_BLOCK, len(packed) + 1, _BLOCK))
    return array("q", map(hash, blocks)).tobytes()


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
    def of(cls, full: bytes, prompt_bytes: int) -> Fingerprint:
        """Make the fingerprint of full tokens whose first `prompt_bytes` bytes are the prompt."""
        if len(full) <= _SHORT:
            return cls(len(full), full)
        ends = (prompt_bytes, len(full))
        edges = tuple((end // _BLOCK, full[end - end % _BLOCK : end]) for end in ends)
        return cls(len(full), b"", block_digests(full), edges)

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
        self._full: dict[int, bytes] = {}

    async def decode(self, n: int, parent: int | None, blob: bytes) -> CallTokens:
        """Return the tokens of transition `n`, a row of the database. Raises `StoreError` when the row or one of its parents is
        damaged."""
        chain: list[Row] = [
            (n, parent, blob)
        ]  # with the ancestors, decoded from the oldest on: no recursion, which may be deep
        child = n
        while parent is not None and parent not in self._full:
            if parent >= child:
                raise StoreError(f"transition {child} names a later one, {parent}, as its parent: the row is corrupt")
            row = await self._fetch(parent)
            if row is None:
                raise StoreError(f"transition {parent}, the parent of {child}, is missing")
            chain.append(row)
            child, parent = parent, row[1]
        for known, above, stored in reversed(chain):
            tokens = decode(stored, self._full[above] if above is not None else b"")
            self._full[known] = full_tokens(tokens)
        return tokens
