from __future__ import annotations

import hashlib
import math
import pickle
import random
import struct
import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.errors import DataError, StoreError
from lightning.store import codec
from lightning.types import TokenIds, logprobs, shared_prefix, token_ids

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(token_ids)
SPECIAL = st.sampled_from([math.nan, -math.inf, math.inf, -0.0, 0.0])
LOGPROBS = st.lists(st.one_of(st.floats(width=32), SPECIAL), max_size=40).map(logprobs)
TOKENS = st.builds(codec.CallTokens, IDS, IDS, LOGPROBS)


def same(left: codec.CallTokens, right: codec.CallTokens) -> bool:
    """Bit for bit: NaN equals itself, 0.0 does not equal -0.0."""
    parts = (
        (left.prompt_ids, right.prompt_ids),
        (left.response_ids, right.response_ids),
        (left.logprobs, right.logprobs),
    )
    return all(a.format == b.format and a.tobytes() == b.tobytes() for a, b in parts)


def encode(tokens: codec.CallTokens, full: bytes = b"") -> bytes:
    """The blob of a call whose parent has these full tokens."""
    packed = codec.pack_tokens(tokens)
    return codec.encode(packed, shared_prefix(packed.prompt, full, codec.ITEM))


def after(full: bytes) -> codec.Decoded:
    """A parent with these full tokens, half of them in its response."""
    ids = codec.unpack_ids(full)
    cut = len(ids) // 2
    return codec.decode(encode(codec.CallTokens(ids[:cut], ids[cut:], logprobs())))


def decoded(blob: bytes, full: bytes = b"") -> codec.CallTokens:
    """The tokens of a blob whose parent has these full tokens."""
    return codec.decode(blob, after(full)).tokens


@given(TOKENS)
def test_round_trip_without_parent(tokens: codec.CallTokens) -> None:
    assert same(decoded(encode(tokens)), tokens)


@given(parent=TOKENS, own=TOKENS, cut=st.integers(0, 80))
def test_round_trip_against_any_parent(parent: codec.CallTokens, own: codec.CallTokens, cut: int) -> None:
    full = codec.full_tokens(parent)
    shared = codec.unpack_ids(full[: cut * 4])
    tokens = codec.CallTokens(token_ids([*shared, *own.prompt_ids]), own.response_ids, own.logprobs)
    assert same(decoded(encode(tokens, full), full), tokens)


@given(calls=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60), IDS, IDS), max_size=12))
def test_calls_of_a_tree_keep_their_tokens_whatever_is_decoded_after_them(calls: list[Any]) -> None:
    """Each call continues an earlier one, from any of its tokens on; their prompts are views of stems that later calls grow."""
    made, known = [codec.NO_PARENT.tokens], [codec.NO_PARENT]
    for above, cut, more, response in calls:
        parent = above % len(made)
        full = codec.full_tokens(made[parent])
        made.append(codec.CallTokens(token_ids([*codec.unpack_ids(full[: cut * 4]), *more]), response, logprobs()))
        known.append(codec.decode(encode(made[-1], full), known[parent]))
    assert all(same(found.tokens, tokens) for found, tokens in zip(known, made, strict=True))


def test_a_conversation_takes_no_more_memory_than_its_longest_call() -> None:
    turns, turn = 40, 250
    blobs, full = [], b""
    for n in range(turns):
        prompt = codec.unpack_ids(full + codec.pack(token_ids(range(n, n + turn))))
        tokens = codec.CallTokens(prompt, token_ids([n] * turn), logprobs())
        blobs.append(encode(tokens, full))
        full = codec.full_tokens(tokens)
    tracemalloc.start()
    try:
        known = [codec.NO_PARENT]
        for blob in blobs:
            known.append(codec.decode(blob, known[-1]))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(known[-1].tokens.prompt_ids) == (2 * turns - 1) * turn
    assert taken < 5 * len(
        full
    )  # the stem while it grew, the responses; twenty times as much with an array for each call


def test_nan_payloads_survive() -> None:
    odd = codec.unpack_logprobs(b"\x01\x00\xc0\x7f\xff\xff\xff\xff")
    tokens = codec.CallTokens(token_ids(), token_ids(), odd)
    assert decoded(encode(tokens)).logprobs.tobytes() == odd.tobytes()


@given(tokens=TOKENS, position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_byte_is_noticed_or_harmless(tokens: codec.CallTokens, position: int, flip: int) -> None:
    blob = bytearray(encode(tokens))
    blob[position % len(blob)] ^= flip
    try:
        found = decoded(bytes(blob))
    except StoreError:
        return
    assert same(found, tokens)  # a bit that zstandard does not read


@given(tokens=TOKENS, length=st.integers(0, 10_000), tail=st.binary(min_size=1, max_size=5))
def test_truncated_or_lengthened_blobs_are_refused(tokens: codec.CallTokens, length: int, tail: bytes) -> None:
    blob = encode(tokens)
    with pytest.raises(StoreError, match="corrupt"):
        decoded(blob[: length % len(blob)])
    with pytest.raises(StoreError, match="corrupt"):
        decoded(blob + tail)


@settings(max_examples=100)
@given(st.binary(max_size=200), IDS)
def test_garbage_never_becomes_tokens(blob: bytes, parent: TokenIds) -> None:
    with pytest.raises(StoreError):
        decoded(b"\x03" + blob, codec.pack(parent))


def test_the_wrong_parent_is_noticed() -> None:
    parent = codec.pack(token_ids(range(100)))
    other = codec.pack(token_ids([*range(50), 999, *range(51, 100)]))
    blob = encode(codec.CallTokens(token_ids(range(120)), token_ids([1]), logprobs([-1.0])), parent)
    assert decoded(blob, parent).prompt_ids == token_ids(range(120))
    for wrong in (other, parent[:80], b""):
        with pytest.raises(StoreError, match="corrupt"):
            decoded(blob, wrong)


def test_another_codec_says_what_to_do() -> None:
    with pytest.raises(StoreError, match="or of codec 4, but this version of lightning works with codec 3 only"):
        decoded(b"\x04whatever")


@given(TOKENS)
def test_a_blob_of_the_codec_before_is_read(tokens: codec.CallTokens) -> None:
    blob = encode(tokens)
    parts = [codec.pack(tokens.prompt_ids), codec.pack(tokens.response_ids), codec.pack(tokens.logprobs)]
    digest = hashlib.blake2b(struct.pack("<3Q", *map(len, parts)) + b"".join(parts), digest_size=8).digest()
    assert same(decoded(b"\x02" + digest + blob[codec.HEAD_BYTES :]), tokens)


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_unpacked() -> None:
    blob = encode(codec.CallTokens(token_ids(), token_ids(), logprobs()))
    header = blob[:13] + b"\xff\xff\xff\xff" + blob[17:]
    with pytest.raises(StoreError, match="corrupt"):
        decoded(header)


@pytest.mark.parametrize(
    "wrong", [array("i", [1]), memoryview(array("q", [1])), [1, 2], logprobs([1.0]), token_ids([1, 2, 3])[::2]]
)
def test_only_token_arrays_are_taken(wrong: object) -> None:
    with pytest.raises(DataError, match="memoryview"):
        encode(codec.CallTokens(wrong, token_ids(), logprobs()))  # type: ignore[arg-type]


def test_errors_can_be_pickled() -> None:
    with pytest.raises(StoreError) as caught:
        decoded(b"")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_turn_of_a_growing_prompt_fits_in_two_kilobytes() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(151_000) for _ in range(694)]
    response = [rng.randrange(151_000) for _ in range(256)]
    parent = codec.pack(token_ids(prompt + response))
    tokens = codec.CallTokens(
        token_ids(prompt + response + [rng.randrange(151_000) for _ in range(50)]),
        token_ids([rng.randrange(151_000) for _ in range(256)]),
        logprobs([-rng.expovariate(1.0) for _ in range(256)]),
    )
    assert len(tokens.prompt_ids) == 1000
    assert len(encode(tokens, parent)) < 1700


@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_prompt_that_goes_on_from_a_late_one_is_hashed_as_any_other(turns: list[tuple[int, int, int]]) -> None:
    late, said = codec.LatePrompts(60_000), dict.fromkeys(range(3), token_ids())
    for who, kept, more in turns:
        said[who] = token_ids([*said[who][:kept], *range(kept, kept + more)])
        tokens = codec.CallTokens(said[who], token_ids(range(300)), logprobs([-0.5]))
        alone, goes_on = codec.pack_tokens(tokens), codec.pack_tokens(tokens, late, who)
        size = len(alone.prompt)
        assert goes_on.digest == alone.digest
        assert goes_on.blocks in (b"", codec.block_digests(alone.prompt))
        assert codec.Fingerprint.of(alone.full, size, goes_on.blocks) == codec.Fingerprint.of(alone.full, size)


def test_late_prompts_hold_no_more_than_their_limit() -> None:
    late, prompt = codec.LatePrompts(100_000), codec.pack(token_ids(range(8000)))
    tracemalloc.start()
    try:
        for who in range(50):
            late.hashed(who % 7, prompt[who:] + prompt[:who])
        assert tracemalloc.get_traced_memory()[0] < 150_000
    finally:
        tracemalloc.stop()
