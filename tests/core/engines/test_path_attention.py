"""Attention over packs against attention over each row, in float64, with all gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch.radix import PrefixTree, build_tree
from lightning.engines.torch.path_attention import (
    BLOCK,
    Enter,
    FlexAttention,
    Kernel,
    MaskedAttention,
    Pack,
    PartsAttention,
    PathLayer,
    block_mask,
    moves,
    pack_tree,
)
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")
Rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8)


def tree_of(rows: list[list[int]]) -> PrefixTree:
    return build_tree([np.array(row, np.int32) for row in rows])


def packs_of(rows: list[list[int]], budget: int) -> list[Pack]:
    tree = tree_of(rows)
    return [move.pack for move in moves(pack_tree(tree, [True] * len(tree.nodes), budget)) if isinstance(move, Enter)]


class Case:
    """Random queries, keys and values of a pack and of its path, with heads of keys grouped, and what should come out."""

    def __init__(self, pack: Pack, *, value_size: int = 8, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(len(pack))

        def random(heads: int, tokens: int, size: int) -> torch.Tensor:
            # As models make them: tokens before heads in memory.
            made = torch.randn(1, tokens, heads, size, generator=generator, dtype=torch.float64).to(dtype)
            return made.transpose(1, 2)

        self.pack = pack
        self.own = [random(4, len(pack), 8), random(2, len(pack), 8), random(2, len(pack), value_size)]
        self.before = [random(2, pack.depth, 8), random(2, pack.depth, value_size)]
        self.upstream = random(4, len(pack), value_size)

    def by(self, kernel: Kernel) -> list[torch.Tensor]:
        """Results, the gradients of queries, keys and values, and those of the path's keys and values."""
        own = [tensor.clone().requires_grad_() for tensor in self.own]
        path = None
        if self.pack.depth:
            path = PathLayer.like(self.before[0], self.before[1], self.pack.depth + 3)
            path.keys[:, :, : self.pack.depth], path.values[:, :, : self.pack.depth] = self.before
        result = kernel(self.pack, CPU)(own[0], own[1], own[2], path, 0.3)
        result.backward(self.upstream)  # type: ignore[no-untyped-call]
        gradients = [tensor.grad for tensor in own]
        if path is None:
            return [result.detach(), *gradients]  # type: ignore[list-item]
        assert not path.key_gradients[:, :, self.pack.depth :].any()
        return [
            result.detach(),
            *gradients,  # type: ignore[list-item]
            path.key_gradients[:, :, : self.pack.depth],
            path.value_gradients[:, :, : self.pack.depth],
        ]

    def by_rows(self) -> list[torch.Tensor]:
        """The same, token by token."""
        own = [tensor.clone().requires_grad_() for tensor in self.own]
        before = [tensor.clone().requires_grad_() for tensor in self.before]
        query, (key, value) = own[0], (torch.cat(pair, dim=2) for pair in zip(before, own[1:], strict=True))
        first, last = self.pack.seen()
        results = []
        for token in range(len(self.pack)):
            chosen = torch.from_numpy(np.flatnonzero((first <= token) & (token < last)))
            part = query[:, :, token : token + 1], key[:, :, chosen], value[:, :, chosen]
            results.append(scaled_dot_product_attention(*part, scale=0.3, enable_gqa=True))
        result = torch.cat(results, dim=2)
        result.backward(self.upstream)  # type: ignore[no-untyped-call]
        leaves = [*own, *before] if self.pack.depth else own
        return [result.detach(), *(tensor.grad for tensor in leaves)]  # type: ignore[list-item]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm()) <= tolerance * max(1.0, float(other.norm()))


@pytest.mark.slow
@given(Rows, st.sampled_from([4, 12, 1000]))
def test_each_way_to_attend_is_attention_over_rows(rows: list[list[int]], budget: int) -> None:
    for pack in packs_of(rows, budget):
        wanted = Case(pack).by_rows()
        assert_close(Case(pack).by(PartsAttention), wanted)
        assert_close(Case(pack).by(MaskedAttention), wanted)


LONG = [[0] * 150 + [1] * 140, [0] * 150 + [2] * 130, [0] * 40 + [3] * 5, [4] * 20]


@pytest.mark.parametrize("budget", [10_000, 300])
def test_values_of_another_size_than_keys(budget: int) -> None:
    for pack in packs_of(LONG, budget):
        case = Case(pack, value_size=4)
        assert_close(case.by(PartsAttention), case.by_rows())


@pytest.mark.parametrize("budget", [10_000, 300])
def test_bfloat16_is_as_close_as_bfloat16_can_be(budget: int) -> None:
    for pack in packs_of(LONG, budget):
        case = Case(pack, dtype=torch.bfloat16)
        found = case.by(PartsAttention)
        assert found[0].dtype is torch.bfloat16
        assert_close(
            [tensor.double() for tensor in found], [tensor.double() for tensor in case.by(MaskedAttention)], 0.02
        )


@pytest.mark.parametrize("budget", [10_000, 600, 300])
def test_blocks_that_flex_attention_skips_are_those_the_mask_forbids(budget: int) -> None:
    for pack in packs_of(LONG, budget):
        mask = block_mask(pack, CPU)
        queries, keys = mask.seq_lengths
        wanted = create_block_mask(mask.mask_mod, None, None, queries, keys, device="cpu", BLOCK_SIZE=BLOCK)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(wanted, name)), name
        assert torch.equal(mask.to_dense(), wanted.to_dense())
        place = torch.arange(queries)[:, None], torch.arange(keys)[None]
        dense = mask.mask_mod(torch.tensor(0), torch.tensor(0), *place)
        assert dense.any(-1).all(), "a query that sees nothing has no softmax"
        assert torch.equal(dense[: len(pack), : pack.depth + len(pack)], MaskedAttention(pack, CPU)._mask)
        assert not dense[: len(pack), pack.depth + len(pack) :].any()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor"
)
@pytest.mark.parametrize("budget", [10_000, 300])
def test_flex_attention(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses its backward pass on a CPU, but has one, in plain operations, behind that refusal."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    for pack in packs_of(LONG, budget):
        case = Case(pack)
        assert_close(case.by(FlexAttention), case.by(MaskedAttention))
    assert BLOCK == 128
