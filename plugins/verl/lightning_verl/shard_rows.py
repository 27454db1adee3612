"""Rows dealt out to the ranks that compute them.

The invariant: every row has exactly one place; places have equally many rows, which is what collectives need; and a row
that only fills a place up has no weight and no call, so it is in no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from lightning.batch import Sample


def deal(lengths: Sequence[int], places: int) -> list[list[int]]:
    """For each place the numbers of its rows, longest first, so that places have about equally many tokens; the last ones
    may have one row less."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    hands: list[list[int]] = [[] for _ in range(places)]
    for turn, start in enumerate(range(0, len(order), places)):
        row = order[start : start + places]
        # To and fro: who got the longest of one round gets the shortest of the next.
        for place, index in zip(range(places) if turn % 2 == 0 else reversed(range(places)), row, strict=False):
            hands[place].append(index)
    return hands


def filler(sample: Sample) -> Sample:
    """A copy of a row that is computed and counts for nothing."""
    zeros = np.zeros(len(sample), np.float32)
    return replace(sample, weights=zeros, spans=())


def share(samples: Sequence[Sample], hand: Sequence[int], count: int) -> list[Sample]:
    """The rows of a place, filled up to a number with the shortest row of all."""
    shortest = min(samples, key=len)
    return [*(samples[index] for index in hand), *[filler(shortest)] * (count - len(hand))]
