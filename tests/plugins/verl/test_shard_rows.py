"""Rows dealt out to ranks: each once, evenly, and what fills up counts for nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch.sample import Sample, TokenSpan
from lightning.engines.rows import is_trained
from lightning_verl.job import deal, share


def row(length: int) -> Sample:
    ones = np.ones(length, np.float32)
    ids = np.arange(length, dtype=np.int32)
    return Sample(ids, ones, ones, ones, ids, (TokenSpan("r", 1, 0, 1, length, 1.0, 1.0),))


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 9))
def test_every_row_has_one_place_and_places_are_even(lengths: list[int], places: int) -> None:
    hands = deal(lengths, places)
    assert sorted(index for hand in hands for index in hand) == list(range(len(lengths)))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    tokens = [sum(lengths[index] for index in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=12), st.integers(1, 9))
def test_shares_are_equally_many_rows_and_fillers_are_in_no_sum(lengths: list[int], places: int) -> None:
    samples = [row(length) for length in lengths]
    hands = deal(lengths, places)
    count = max(len(hand) for hand in hands)
    shares = [share(samples, hand, count) for hand in hands]
    assert {len(own) for own in shares} == {count}
    trained = [sample for own in shares for sample in own if is_trained(sample)]
    assert sorted(len(sample) for sample in trained) == sorted(lengths)
    assert all(
        len(sample) == min(lengths) and not sample.spans for own in shares for sample in own if not is_trained(sample)
    )
