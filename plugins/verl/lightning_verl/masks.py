"""The sampling masks of a rank's rows, as they travel with verl's data.

The invariant: a token's mask follows the token wherever verl packs its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from lightning.batch import Ragged, Sample, SamplingMask
from lightning.engines.rows import Ints, masks_at

from lightning_verl import api

if TYPE_CHECKING:
    from lightning_verl.api import TensorDict

MASKS = "row_masks"


class RowMasks:
    """The masks of rows, in the order of the `row` numbers of verl's data."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def of(self, rows: Sequence[int], places: Ints) -> SamplingMask | None:
        """Return the masks of some tokens (N,) of some rows; None if no token of the rows has one. `places` (N,) has each
        token's number in these rows, one row behind another, from 1 on; 0 is what pads them."""
        packed = [self._samples[row] for row in rows]
        found = masks_at(packed, [np.arange(len(sample)) for sample in packed])
        if found is None:
            return None
        return SamplingMask.joined([SamplingMask.none(1, found.vocab_size), found])[places]


def given(data: TensorDict) -> RowMasks | None:
    """Return the masks that travel with verl's data; None if no row has any."""
    found: RowMasks | None = api.get_non_tensor_data(data, MASKS, None)
    return found


def cut_words(mask: SamplingMask, first: int, width: int) -> SamplingMask:
    """Return what a mask says of `width` words from `first` on, which then count from 0."""
    return SamplingMask(width, mask.is_left_out, _cut(mask.ids, first, width), _cut(mask.bias, first, width))


def _cut(lists: Ragged, first: int, width: int) -> Ragged:
    own = (lists.ids >= first) & (lists.ids < first + width)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(own)])
    values = None if lists.values is None else lists.values[own]
    return Ragged(lists.which, ends[lists.offsets], lists.ids[own] - first, values)
