"""Attention over a pack of a prefix tree by FlexAttention, for CUDA: one kernel that skips the blocks nobody sees.

The invariant: what is skipped is exactly what the mask forbids. The mask is an interval of queries for each key
(`Pack.seen`), so blocks are found from intervals, without a table of N times N.

torch's kernel for a CPU has no backward pass; there the tests check this module's forward pass, its blocks, and the mask that
it shares with `masked_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import pad

from lightning.engines.torch.packing import Pack
from lightning.engines.torch.path_attention import PathLayer, with_path

BLOCK = 128
"""Queries and keys of a block: what FlexAttention's kernels take by default."""


@cache
def _kernel(*, compiled: bool) -> Callable[..., torch.Tensor]:
    if compiled:
        made: Callable[..., torch.Tensor] = torch.compile(torch_flex_attention)
        return made
    return torch_flex_attention


class FlexAttention:
    """A `Kernel`. Tokens are padded to whole blocks, so that few different shapes have to be compiled."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._pack = pack
        self._mask = block_mask(pack, device)
        self._run = _kernel(compiled=device.type == "cuda")

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, path: PathLayer | None, scale: float
    ) -> torch.Tensor:
        """Attend; see `Attend`."""
        if path is not None:
            key, value = with_path(key, value, path, self._pack.depth)
        queries, keys = self._mask.seq_lengths
        result = self._run(
            pad(query, (0, 0, 0, queries - query.shape[2])),
            pad(key, (0, 0, 0, keys - key.shape[2])),
            pad(value, (0, 0, 0, keys - value.shape[2])),
            block_mask=self._mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return result[:, :, : len(self._pack)]


def block_mask(pack: Pack, device: torch.device) -> BlockMask:
    """Which blocks of queries of a pack see all or some of which blocks of keys, the path's before the pack's own.

    Behind the last token, padding is seen by padding alone: a query that sees nothing has no softmax.
    """
    first, last = pack.seen()
    queries = len(pack) + -len(pack) % BLOCK
    keys = (len(first) // BLOCK + 1) * BLOCK
    first = np.concatenate([first, np.full(keys - len(first), len(pack))])
    last = np.concatenate([last, np.full(keys - len(last), queries)])
    starts = np.arange(0, queries, BLOCK)[:, None]
    some = (first < starts + BLOCK) & (last > starts)
    whole = (first <= starts) & (last >= starts + BLOCK)
    full: npt.NDArray[np.bool_] = np.all(whole.reshape(len(starts), -1, BLOCK), axis=-1)
    partial: npt.NDArray[np.bool_] = np.logical_and(some.reshape(len(starts), -1, BLOCK).any(-1), ~full)
    from_, to = torch.from_numpy(first).to(device), torch.from_numpy(last).to(device)

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (from_[key] <= query) & (query < to[key])

    return BlockMask.from_kv_blocks(
        *_ordered(partial, device), *_ordered(full, device), BLOCK, mask_mod=seen, seq_lengths=(queries, keys)
    )


def _ordered(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, 1, Q) how many and (1, 1, Q, K) which blocks of keys each block of queries has, these first."""
    count = torch.from_numpy(blocks.sum(-1).astype(np.int32)).to(device)
    which = torch.from_numpy(np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)).to(device)
    return count[None, None], which[None, None]
