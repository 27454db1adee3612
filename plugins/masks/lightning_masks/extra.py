"""The extra `masks` of a call: the masks of its tokens and the biases of its request, compressed.

The invariant: what `read` returns is what `written` got. An extra of another version, or a damaged one, is refused.

It has the version (one byte), the size of the vocabulary, the number of tokens and the number of biases (uint32 each), the ids
(int32) and values (float32) of the biases, all little-endian; and by zlib the number of each token's code, as LEB128, and the
codes (`codes`). Equal masks, which a grammar makes, are one code.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from lightning.batch import Ragged, SamplingMask
from lightning.errors import DataError
from lightning.types import Transition

from lightning_masks.codes import NAME, packed, unpacked

VERSION = 1
HEAD = struct.Struct("<BIII")
MOST_BYTES = 1 << 28
"""The most bytes of codes that are read."""


def written(vocab_size: int, codes: Sequence[bytes], bias: Mapping[int, float]) -> bytes:
    """Return the extra of a call whose tokens have these codes."""
    numbers: dict[bytes, int] = {}
    which = np.array([numbers.setdefault(code, len(numbers)) for code in codes], np.int64)
    ids, values = np.array(sorted(bias), "<i4"), np.array([bias[own] for own in sorted(bias)], "<f4")
    head = HEAD.pack(VERSION, vocab_size, len(codes), len(bias))
    return head + ids.tobytes() + values.tobytes() + zlib.compress(packed(which).tobytes() + b"".join(numbers))


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
    compressed = zlib.decompressobj()
    codes = compressed.decompress(data[end:], MOST_BYTES)
    if not compressed.eof:
        raise ValueError("their codes do not end")
    numbers = unpacked(np.frombuffer(codes, np.uint8))
    if len(numbers) < tokens:
        raise ValueError(f"they are of {len(numbers)} tokens, not {tokens}")
    which, numbers = numbers[:tokens], numbers[tokens:]
    starts: list[int] = []
    at = 0
    while at < len(numbers):
        starts.append(at)
        at += 1 + (int(numbers[at]) >> 1)
    if at != len(numbers) or len(starts) != int(which.max(initial=-1)) + 1:
        raise ValueError("their lists do not end with the codes")
    heads = np.array(starts, np.int64)
    counts = numbers[heads] >> 1
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    steps = np.delete(numbers, heads) + 1
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])
    ids = sums[1:] - np.repeat(sums[offsets[:-1]], counts) - 1
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(f"an id is outside of their vocabulary of {vocab_size}")
    return SamplingMask(
        vocab_size,
        (numbers[heads] & 1).astype(np.bool_)[which],
        Ragged(which, offsets, ids.astype(np.int32)),
        Ragged(np.zeros(tokens, np.int64), np.array([0, biased]), bias_ids.astype(np.int32), bias.astype(np.float32)),
    )
