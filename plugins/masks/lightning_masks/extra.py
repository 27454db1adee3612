"""The extra `masks` of a call: the masks of its tokens and the biases of its request, compressed.

The invariant: what `read` returns is what `written` got. An extra of another version, or a damaged one, is refused.

It has the version (one byte), the size of the vocabulary, the number of tokens and the number of biases (uint32 each), the ids
(int32) and values (float32) of the biases, and the tokens' codes (`codes`) by zlib; all little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np
from lightning.batch import Ragged, SamplingMask
from lightning.errors import DataError
from lightning.types import Transition

from lightning_masks.codes import NAME, unpacked

VERSION = 1
HEAD = struct.Struct("<BIII")
MOST_BYTES = 1 << 28
"""The most bytes of codes that are read."""


def written(vocab_size: int, tokens: int, codes: bytes, bias: Mapping[int, float]) -> bytes:
    """Return the extra of a call with this number of tokens."""
    ids, values = np.array(sorted(bias), "<i4"), np.array([bias[own] for own in sorted(bias)], "<f4")
    head = HEAD.pack(VERSION, vocab_size, tokens, len(bias))
    return head + ids.tobytes() + values.tobytes() + zlib.compress(codes)


def read(call: Transition) -> SamplingMask:
    """Return the sampling masks of a call's response tokens. Raises `DataError` for an extra that this release cannot read."""
    data = call.extras[NAME]
    if not data or data[0] != VERSION:
        raise DataError(
            f"its sampling masks are of version {data[0] if data else 'none'}, and this release of lightning reads {VERSION}: "
            "use the release that recorded the call"
        )
    try:
        return _read(data)
    except (ValueError, struct.error, zlib.error) as error:
        raise DataError(f"its sampling masks are damaged ({error}): leave the rollout out") from error


def _read(data: bytes) -> SamplingMask:
    _, vocab_size, tokens, biased = HEAD.unpack_from(data)
    middle, end = HEAD.size + 4 * biased, HEAD.size + 8 * biased
    bias_ids, bias = np.frombuffer(data[HEAD.size : middle], "<i4"), np.frombuffer(data[middle:end], "<f4")
    packed = zlib.decompressobj()
    codes = packed.decompress(data[end:], MOST_BYTES)
    if not packed.eof:
        raise ValueError("their codes do not end")
    numbers = unpacked(np.frombuffer(codes, np.uint8))
    heads = np.zeros(tokens, np.int64)
    at = 0
    for token in range(tokens):
        if at >= len(numbers):
            raise ValueError(f"they are of {token} tokens, not {tokens}")
        heads[token] = at
        at += 1 + (int(numbers[at]) >> 1)
    if at != len(numbers):
        raise ValueError("their lists do not end with the codes")
    counts = numbers[heads] >> 1
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    steps = np.delete(numbers, heads) + 1
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])
    ids = sums[1:] - np.repeat(sums[offsets[:-1]], counts) - 1
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(f"an id is outside of their vocabulary of {vocab_size}")
    return SamplingMask(
        vocab_size,
        (numbers[heads] & 1).astype(np.bool_),
        Ragged(offsets, ids.astype(np.int32)),
        Ragged(
            np.arange(tokens + 1, dtype=np.int64) * biased,
            np.tile(bias_ids, tokens).astype(np.int32),
            np.tile(bias, tokens).astype(np.float32),
        ),
    )
