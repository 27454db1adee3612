from __future__ import annotations

import math
import pickle
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.errors import DataError, StoreError
from lightning.store import codec
from lightning.types import logprobs, token_ids

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
    return all(a.typecode == b.typecode and a.tobytes() == b.tobytes() for a, b in parts)


@given(TOKENS)
def test_round_trip_without_parent(tokens: codec.CallTokens) -> None:
    assert same(codec.decode(codec.encode(tokens)), tokens)


@given(parent=TOKENS, own=TOKENS, cut=st.integers(0, 80))
def test_round_trip_against_any_parent(parent: codec.CallTokens, own: codec.CallTokens, cut: int) -> None:
    full = codec.full_tokens(parent)
    shared = codec.unpack_ids(full[: cut * 4])
    tokens = codec.CallTokens(shared + own.prompt_ids, own.response_ids, own.logprobs)
    assert same(codec.decode(codec.encode(tokens, full), full), tokens)


def test_nan_payloads_survive() -> None:
    odd = codec.unpack_logprobs(b"\x01\x00\xc0\x7f\xff\xff\xff\xff")
    tokens = codec.CallTokens(token_ids(), token_ids(), odd)
    assert codec.decode(codec.encode(tokens)).logprobs.tobytes() == odd.tobytes()


@given(tokens=TOKENS, position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_byte_is_noticed_or_harmless(tokens: codec.CallTokens, position: int, flip: int) -> None:
    blob = bytearray(codec.encode(tokens))
    blob[position % len(blob)] ^= flip
    try:
        found = codec.decode(bytes(blob))
    except StoreError:
        return
    assert same(found, tokens)  # a bit that zstandard does not read


@given(tokens=TOKENS, length=st.integers(0, 10_000), tail=st.binary(min_size=1, max_size=5))
def test_truncated_or_lengthened_blobs_are_refused(tokens: codec.CallTokens, length: int, tail: bytes) -> None:
    blob = codec.encode(tokens)
    with pytest.raises(StoreError, match="corrupt"):
        codec.decode(blob[: length % len(blob)])
    with pytest.raises(StoreError, match="corrupt"):
        codec.decode(blob + tail)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_garbage_never_becomes_tokens(blob: bytes, parent: bytes) -> None:
    with pytest.raises(StoreError):
        codec.decode(b"\x02" + blob, parent)


def test_the_wrong_parent_is_noticed() -> None:
    parent = codec.pack(token_ids(range(100)))
    other = codec.pack(token_ids([*range(50), 999, *range(51, 100)]))
    blob = codec.encode(codec.CallTokens(token_ids(range(120)), token_ids([1]), logprobs([-1.0])), parent)
    assert codec.decode(blob, parent).prompt_ids == token_ids(range(120))
    for wrong in (other, parent[:80], b""):
        with pytest.raises(StoreError, match="corrupt"):
            codec.decode(blob, wrong)


def test_another_codec_says_what_to_do() -> None:
    with pytest.raises(StoreError, match="or of codec 3, but this version of lightning works with codec 2 only"):
        codec.decode(b"\x03whatever")


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_unpacked() -> None:
    blob = codec.encode(codec.CallTokens(token_ids(), token_ids(), logprobs()))
    header = blob[:13] + b"\xff\xff\xff\xff" + blob[17:]
    with pytest.raises(StoreError, match="corrupt"):
        codec.decode(header)


@pytest.mark.parametrize("wrong", [array("q", [1]), [1, 2], array("f", [1.0])])
def test_only_token_arrays_are_taken(wrong: object) -> None:
    with pytest.raises(DataError, match="array"):
        codec.encode(codec.CallTokens(wrong, token_ids(), logprobs()))  # type: ignore[arg-type]


def test_errors_can_be_pickled() -> None:
    with pytest.raises(StoreError) as caught:
        codec.decode(b"")
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
    assert len(codec.encode(tokens, parent)) < 1700
