"""The code of one token's mask, made in vLLM's worker, of which answers carry many (`texts`).

The invariant: a code has all ids that were kept, or all that were left out, whichever are fewer; and codes of several tokens
put one behind another can be read again without anything else.

A code is a run of unsigned LEB128 numbers: twice the count of the ids, plus 1 if these were left out, and then for each id, in
ascending order, how many ids lie between it and the one before.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
from lightning.policy_server.vllm_arguments import ServerPart

NAME = "masks"
"""The name of the plugin's extra, and of its texts in answers."""
HEADER, WANTED = "x-lightning-masks", "2"
"""The header of a request that wants masks, and its value: the version of the code."""
ASKED = "lightning_masks"
"""The key of vLLM's `SamplingParams.extra_args` by which its workers know such a request."""
MIDDLEWARE = "lightning_masks.middleware.SamplingMasks"
WORKER = "lightning_masks.worker:install"
LIMITS = 1 << np.arange(7, 35, 7)
"""The numbers from which on LEB128 needs 2, 3, 4 and 5 bytes."""
LONG = 1 << 11
"""From so many ids on, to find a code by its bitmask is much quicker than to make it."""
Bytes = npt.NDArray[np.uint8]


def server_part() -> ServerPart:
    """Return what the plugin has in the processes of a vLLM."""
    return ServerPart(MIDDLEWARE, WORKER)


def code_of(kept: npt.NDArray[np.bool_]) -> bytes:
    """Return the code of a token that was drawn among the ids where `kept` (V,) is true."""
    count = int(np.count_nonzero(kept))
    is_left_out = 2 * count > len(kept)
    ids = np.flatnonzero(~kept if is_left_out else kept)
    gaps = np.diff(ids, prepend=-1) - 1
    return packed(np.array([2 * len(ids) + is_left_out])).tobytes() + packed(gaps).tobytes()


class Codes:
    """Returns the codes of tokens, and keeps the last `most` long ones, because a grammar makes equal masks again and again."""

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def of(self, kept: npt.NDArray[np.bool_]) -> bytes:
        """Return `code_of(kept)`."""
        count = int(np.count_nonzero(kept))
        if min(count, len(kept) - count) < LONG:
            return code_of(kept)
        bits = np.packbits(kept).tobytes()
        found = self._kept.pop(bits, None)
        self._kept[bits] = code = code_of(kept) if found is None else found
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return code


def packed(numbers: npt.NDArray[np.int64]) -> Bytes:
    """Return non-negative numbers below 2**35 as LEB128."""
    large = np.flatnonzero(numbers >= LIMITS[0])  # of a third of a vocabulary few gaps are
    if not len(large):
        return numbers.astype(np.uint8)
    sizes = np.ones(len(numbers), np.int64)
    sizes[large] += np.searchsorted(LIMITS, numbers[large], side="right")
    starts = np.cumsum(sizes) - sizes
    found = np.zeros(int(sizes.sum()), np.uint8)
    found[starts] = (numbers & 0x7F) | (sizes > 1) << 7
    for place in range(1, int(sizes.max())):
        chosen = large[sizes[large] > place]
        more = (sizes[chosen] > place + 1) << 7
        found[starts[chosen] + place] = ((numbers[chosen] >> (7 * place)) & 0x7F) | more
    return found


def unpacked(data: Bytes) -> npt.NDArray[np.int64]:
    """Return the numbers of LEB128. Raises `ValueError` for bytes that end within a number, and for a number of more than five
    bytes."""
    ends = np.flatnonzero(data < 0x80) + 1
    if len(data) and (not len(ends) or ends[-1] != len(data)):
        raise ValueError("the masks end within a number")
    sizes = np.diff(ends, prepend=0)
    if int(sizes.max(initial=0)) > 5:
        raise ValueError("the masks have a number of more than five bytes")
    found = np.zeros(len(ends), np.int64)
    for place in range(int(sizes.max(initial=0))):
        chosen = sizes > place
        found[chosen] |= (data[(ends - sizes)[chosen] + place] & 0x7F).astype(np.int64) << (7 * place)
    return found
