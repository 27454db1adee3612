"""The fingerprint by which the engine, the trainer and the audit agree on what was trained."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import sampler_logprobs, span_digest, transition_digest
from lightning.testing.trajectories import make_call
from lightning.types import logprobs, token_ids


def test_layout_is_ids_then_logprobs_little_endian() -> None:
    expected = hashlib.sha256(struct.pack("<2i2f", 7, 8, -0.5, -1.25)).hexdigest()
    assert span_digest([7, 8], [-0.5, -1.25]) == expected
    assert span_digest(token_ids([7, 8]), logprobs([-0.5, -1.25])) == expected
    assert span_digest(np.array([7, 8], np.int64), np.array([-0.5, -1.25], np.float32)) == expected


def test_missing_logprobs_are_those_of_the_training_row() -> None:
    call = make_call((1,), (7, 8), logprob=None)
    assert np.isnan(sampler_logprobs(call)).all()
    assert span_digest(call.response_ids, call.logprobs) == transition_digest(call)
    assert transition_digest(replace(make_call((1,), (7, 8)), constrained=True)) == transition_digest(call)


ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


@given(ids, st.data())
def test_any_single_change_is_seen(tokens: list[int], data: st.DataObject) -> None:
    values = [-0.5] * len(tokens)
    place = data.draw(st.integers(0, len(tokens) - 1))
    other, moved = list(tokens), list(values)
    other[place] = data.draw(st.integers(0, 2**31 - 1).filter(lambda value: value != tokens[place]))
    moved[place] = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    original = span_digest(tokens, values)
    assert span_digest(other, values) != original
    assert span_digest(tokens, moved) != original
    if tokens[::-1] != tokens:
        assert span_digest(tokens[::-1], values) != original


def test_ids_that_do_not_fit_are_not_wrapped() -> None:
    with pytest.raises(OverflowError):
        span_digest([2**31], [-1.0])
