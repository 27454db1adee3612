"""The token codec on bytes that nobody wrote: every answer is tokens that were encoded, or a `StoreError`, soon and small."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.errors import StoreError
from lightning.store import codec
from lightning.types import logprobs, token_ids

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30).map(token_ids)
TOKENS = st.builds(codec.CallTokens, IDS, IDS, st.lists(st.floats(width=32), max_size=30).map(logprobs))
HUGE = (1 << 20, 1 << 30, 1 << 31, (1 << 32) - 1)


def encode(tokens: codec.CallTokens) -> bytes:
    """The blob of a call without a parent."""
    return codec.encode(codec.pack_tokens(tokens), 0)


def decoded(blob: bytes, parent: codec.Decoded = codec.NO_PARENT) -> codec.CallTokens | None:
    """The tokens, or None where the blob was refused."""
    try:
        return codec.decode(blob, parent).tokens
    except StoreError:
        return None


@settings(max_examples=80)
@given(tokens=TOKENS, data=st.data())
def test_edits_of_any_kind_give_the_same_tokens_or_a_refusal(tokens: codec.CallTokens, data: st.DataObject) -> None:
    blob = bytearray(encode(tokens))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(blob)))
        kind = data.draw(st.sampled_from(["insert", "delete", "replace", "repeat", "swap"]))
        length = data.draw(st.integers(1, 8))
        piece = bytes(blob[place : place + length])
        if kind == "insert":
            blob[place:place] = data.draw(st.binary(max_size=8))
        elif kind == "delete":
            del blob[place : place + length]
        elif kind == "replace":
            blob[place : place + length] = data.draw(st.binary(min_size=len(piece), max_size=len(piece)))
        elif kind == "repeat":
            blob[place:place] = piece
        else:
            blob[place : place + length] = piece[::-1]
    found = decoded(bytes(blob))
    if found is not None:
        assert [part.tobytes() for part in (found.prompt_ids, found.response_ids, found.logprobs)] == [
            part.tobytes() for part in (tokens.prompt_ids, tokens.response_ids, tokens.logprobs)
        ]


@settings(max_examples=80)
@given(
    counts=st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5),
    digest=st.binary(min_size=8, max_size=8),
    frames=st.binary(max_size=40),
    sizes=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    parent=TOKENS,
)
def test_a_well_formed_header_over_nonsense_is_refused(
    counts: list[int], digest: bytes, frames: bytes, sizes: tuple[int, int], parent: codec.CallTokens
) -> None:
    """Counts and frames that claim whatever they like, in the codec's own shape."""
    low, high = (_frame(size) for size in sizes)
    counts[4] = len(low)
    head = codec.HEADER.pack(codec.VERSION, digest, *counts)
    above = codec.decode(encode(parent))
    assert decoded(head + low + high, above) is None
    assert decoded(head + frames, above) is None


def _frame(size: int) -> bytes:
    """A zstandard frame whose header claims so many bytes and which has one empty block."""
    return b"\xe0" + struct.pack("<Q", size) + b"\x01\x00\x00"


@pytest.mark.parametrize("count", HUGE)
def test_header_and_frame_that_agree_on_too_much_cost_no_memory(count: int) -> None:
    frame = _frame(2 * count)
    head = codec.HEADER.pack(codec.VERSION, b"x" * 8, 0, count, 0, 0, len(frame))
    tracemalloc.start()
    try:
        assert decoded(head + frame + frame) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_compresses_best_is_still_read() -> None:
    """The bound on how much a frame can hold is not too small for the most regular content there is."""
    tokens = codec.CallTokens(token_ids([7] * 300_000), token_ids([0] * 100_000), logprobs([0.0] * 100_000))
    blob = encode(tokens)
    assert len(blob) < 1000
    assert decoded(blob) == tokens
