"""Token arrays to bytes and back, small and exact.

The invariant: `decode(encode(x, parent), parent) == x` bit for bit (NaN payloads included), and a blob that was damaged, or
that is decoded against another parent than it was encoded with, raises `StoreError` instead of returning tokens.

Layout of a blob, all integers little-endian:

    byte 0       codec version, 1
    bytes 1-8    BLAKE2b-64 of the decoded content (see `content_digest`)
    varints      how many tokens are shared with the parent, further prompt ids, response ids, log-probabilities, bytes of `low`
    rest         two zstandard frames, `low` and `high`, of the further prompt ids and response ids (int32) and the
                 log-probabilities (float32); nothing when there are none

The parent of a call is an earlier call whose full tokens (prompt + response) begin as this prompt begins: the previous turn of
the same agent, or a sibling of the group with the same system prompt. Only what comes after the shared prefix is stored.
Numbers are stored as planes of bytes of equal place: `high` has the two highest bytes of the ids and the exponents of the
log-probabilities, which compress well, and `low` has the rest, which hardly does and would spoil the statistics of the others.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
from array import array
from dataclasses import dataclass
from typing import Final

import zstandard

from lightning.errors import DataError, StoreError
from lightning.installation import other_format
from lightning.types import LogProbs, TokenIds, shared_prefix

VERSION: Final = 1
LEVEL: Final = 3
DIGEST_BYTES: Final = 8
"""Against accidents, not forgers: what an optimizer step trained is proven by the SHA-256 digests of its `StepRecord`."""
HEAD_BYTES: Final = 1 + DIGEST_BYTES
"""What `stored_digest` reads of a blob."""
ITEM: Final = 4
"""Bytes of a packed token id or log-probability."""
_MAX_SHIFT: Final = 35
_LEAST_BLOCK: Final = 4
"""Bytes of the shortest block of a zstandard frame: one byte, and how often it repeats."""
_MOST_OF_BLOCK: Final = 128 << 10
"""Bytes that a block decompresses to at most."""


@dataclass(frozen=True, slots=True)
class CallTokens:
    """What one model call read and wrote; the part of a transition that is worth compressing."""

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
        """Prompt then response: what a later call may share a prefix with."""
        return self.prompt + self.response


class _Local(threading.local):
    """zstandard contexts are not thread-safe and cost more than one compression: each thread keeps its own."""

    def __init__(self) -> None:
        # long matches only: short ones in planes of few distinct bytes cost more than their entropy
        parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, min_match=7)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


def pack(values: TokenIds | LogProbs) -> bytes:
    """The little-endian bytes of an `array('i')` or `array('f')`. Raises `DataError` for any other array."""
    if not isinstance(values, array) or values.typecode not in "if" or values.itemsize != ITEM:
        kind = f"array({values.typecode!r})" if isinstance(values, array) else type(values).__name__
        raise DataError(
            f"expected array('i') of token ids or array('f') of log-probabilities, got {kind}: "
            "build it with lightning.types.token_ids() or logprobs()"
        )
    return _native(values.tobytes())


def unpack_ids(data: bytes) -> TokenIds:
    """`array('i')` from little-endian int32 bytes."""
    values = array("i")
    values.frombytes(_native(data))
    return values


def unpack_logprobs(data: bytes) -> LogProbs:
    """`array('f')` from little-endian float32 bytes."""
    values = array("f")
    values.frombytes(_native(data))
    return values


def full_tokens(tokens: CallTokens) -> bytes:
    """Prompt then response as packed int32: what a later call may share a prefix with."""
    return pack(tokens.prompt_ids) + pack(tokens.response_ids)


def content_digest(prompt: bytes, response: bytes, logprobs: bytes) -> bytes:
    """BLAKE2b-64 over the three packed arrays, each preceded by its length, so that no two contents look alike."""
    digest = hashlib.blake2b(struct.pack("<3Q", len(prompt), len(response), len(logprobs)), digest_size=DIGEST_BYTES)
    for part in (prompt, response, logprobs):
        digest.update(part)
    return digest.digest()


def stored_digest(blob: bytes) -> bytes:
    """The content digest a blob claims to have, without decoding it; the first `HEAD_BYTES` of the blob are enough."""
    _check_version(blob)
    return bytes(blob[1:HEAD_BYTES])


def pack_tokens(tokens: CallTokens) -> Packed:
    """Everything of the encoding that does not depend on a parent. Raises `DataError` for wrong arrays."""
    for name, values, code in (
        ("prompt_ids", tokens.prompt_ids, "i"),
        ("response_ids", tokens.response_ids, "i"),
        ("logprobs", tokens.logprobs, "f"),
    ):
        if not isinstance(values, array) or values.typecode != code:
            raise DataError(f"{name} must be array({code!r}), as lightning.types.token_ids() and logprobs() build")
    prompt, response, logprobs = pack(tokens.prompt_ids), pack(tokens.response_ids), pack(tokens.logprobs)
    return Packed(prompt, response, logprobs, content_digest(prompt, response, logprobs))


def encode(tokens: CallTokens, parent: bytes = b"") -> bytes:
    """Encode against the packed full tokens of a parent (empty: against nothing). Raises `DataError` for wrong arrays."""
    packed = pack_tokens(tokens)
    return encode_packed(packed, shared_prefix(packed.prompt, parent, ITEM))


def encode_packed(packed: Packed, shared: int) -> bytes:
    """Encode against a parent whose full tokens begin with the first `shared` ids of the prompt."""
    rest = packed.prompt[shared * ITEM :]
    planes = _to_planes(rest + packed.response, packed.logprobs)
    low, high = (_local.compressor.compress(plane) if plane else b"" for plane in planes)
    lengths = (len(part) // ITEM for part in (rest, packed.response, packed.logprobs))
    return b"".join((bytes((VERSION,)), packed.digest, *map(_to_varint, (shared, *lengths, len(low))), low, high))


def decode(blob: bytes, parent: bytes = b"") -> CallTokens:
    """The tokens of a blob, given the packed full tokens of the parent it was encoded against.

    Raises `StoreError` when the blob is damaged, of another codec, or does not belong to this parent.
    """
    digest = stored_digest(blob)
    (shared, n_rest, n_response, n_logprobs, n_low), start = _read_varints(blob, 1 + DIGEST_BYTES, 5)
    if shared * ITEM > len(parent):
        raise StoreError("token blob is corrupt: it shares more tokens with its parent than the parent has")
    n_ids = n_rest + n_response
    low = _decompress(blob[start : start + n_low], 2 * n_ids + 3 * n_logprobs)
    high = _decompress(blob[start + n_low :], 2 * n_ids + n_logprobs)
    ids, logprobs = _from_planes(low, high, n_ids, n_logprobs)
    prompt, response = parent[: shared * ITEM] + ids[: n_rest * ITEM], ids[n_rest * ITEM :]
    if content_digest(prompt, response, logprobs) != digest:
        raise StoreError("token blob is corrupt: its content does not match its checksum")
    return CallTokens(unpack_ids(prompt), unpack_ids(response), unpack_logprobs(logprobs))


def _native(data: bytes) -> bytes:
    """Between little-endian and this machine's order, either way: the same bytes, or the four of each number reversed."""
    if sys.byteorder == "little":
        return data
    return b"".join(data[at : at + ITEM][::-1] for at in range(0, len(data), ITEM))


def _check_version(blob: bytes) -> None:
    if not blob:
        raise StoreError("token blob is corrupt: it is empty")
    if blob[0] != VERSION:
        raise StoreError(other_format(f"token blob is corrupt, or of codec {blob[0]}", f"codec {VERSION}"))


def _to_varint(value: int) -> bytes:
    """LEB128: seven bits a byte, lowest first, the top bit says that more follow."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varints(blob: bytes, at: int, count: int) -> tuple[list[int], int]:
    """`count` varints from byte `at` on, and where they end."""
    values: list[int] = []
    value = shift = 0
    while len(values) < count:
        if at >= len(blob) or shift > _MAX_SHIFT:
            raise StoreError("token blob is corrupt: its header is cut off or makes no sense")
        value |= (blob[at] & 0x7F) << shift
        if blob[at] > 0x7F:
            shift += 7
        else:
            values.append(value)
            value = shift = 0
        at += 1
    return values, at


def _decompress(frame: bytes, size: int) -> bytes:
    """Decompress exactly `size` bytes; the size is checked first, so that a damaged frame cannot ask for all memory."""
    if not size:
        if frame:
            raise StoreError("token blob is corrupt: it has more than its header says")
        return b""
    if size > _MOST_OF_BLOCK * (len(frame) // _LEAST_BLOCK + 1):
        raise StoreError("token blob is corrupt: no frame of its length can hold what its header says")
    try:
        if zstandard.frame_content_size(frame) != size:
            raise StoreError("token blob is corrupt: its header and its compressed frame disagree about the size")
        payload = _local.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StoreError(f"token blob is corrupt: {error}") from error
    if len(payload) != size:
        raise StoreError("token blob is corrupt: it decompresses to the wrong size")
    return payload


def _to_planes(ids: bytes, logprobs: bytes) -> tuple[bytes, bytes]:
    """`low` and `high`, as the module says."""
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
