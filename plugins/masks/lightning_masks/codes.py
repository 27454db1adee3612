"""The code of one token's mask, made in vLLM's worker, of which answers carry many (`texts`).

The invariant: a code has all ids that were kept, or all that were left out, whichever are fewer; and codes of several tokens
put one behind another can be read again without anything else.

A code is a run of unsigned LEB128 numbers: twice the count of the ids, plus 1 if these were left out, and then for each id, in
ascending order, how many ids lie between it and the one before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from lightning.policy_server.vllm_arguments import ServerPart

NAME = "masks"
"""The name of the plugin's extra, and of its texts in answers."""
HEADER, WANTED = "x-lightning-masks", "1"
"""The header of a request that wants masks, and its value: the version of the code."""
ASKED = "lightning_masks"
"""The key of vLLM's `SamplingParams.extra_args` by which its workers know such a request."""
MIDDLEWARE = "lightning_masks.middleware.SamplingMasks"
WORKER = "lightning_masks.worker:install"
LIMITS = 1 << np.arange(7, 35, 7)
"""The numbers from which on LEB128 needs 2, 3, 4 and 5 bytes."""
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
    return packed(np.concatenate([[2 * len(ids) + is_left_out], gaps])).tobytes()


def packed(numbers: npt.NDArray[np.int64]) -> Bytes:
    """Return non-negative numbers below 2**35 as LEB128."""
    sizes = 1 + np.searchsorted(LIMITS, numbers, side="right")
    ends = np.cumsum(sizes)
    found = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for place in range(int(sizes.max(initial=0))):
        chosen = sizes > place
        more = (sizes[chosen] > place + 1) << 7
        found[(ends - sizes)[chosen] + place] = ((numbers[chosen] >> (7 * place)) & 0x7F) | more
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
