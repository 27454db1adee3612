"""Attention over a pack of a prefix tree: each token attends to its ancestors in the pack and to the path that leads to the
pack.

The invariant: output and gradients are those of ordinary causal attention over each token's own row. The gradient of a pack
with respect to the keys and values of its path is added to the path's gradients, from which the packs above continue.

On a CPU a token's past is attended to in parts (its chain, the chains that its branch left, the path), and the results are
merged by their log-sum-exps. Each part's gradient is then the kernel's own, given the merged output and log-sum-exp, because
softmax over a part is softmax over all times a factor that the two contain (as in Ring Attention, arXiv 2310.01889). So nothing
is masked, copied or padded.

On CUDA FlexAttention is one kernel that skips the blocks of keys that no query of a block attends to. The mask of each key is
an interval of queries (`Pack.seen`), so the blocks are computed from intervals, without a table of N times N. torch's kernel
for a CPU has no backward pass; there the tests check the forward pass, the blocks and the mask.

A pack is the set of tokens that goes through the model at one time. Every needed token of the tree is in exactly one pack, and
a pack holds at most its share of the budget. A token may attend to the tokens before it in its own pack that are of its node or
of an ancestor node, and to the path that leads to the pack. A tree that fits the budget is one pack, together with other such
trees. A larger tree is cut, from its leaves upwards, into the smallest possible number of connected packs of half the budget
(Kundu and Misra, "A linear tree partitioning algorithm", SIAM J. Comput. 1977). Packs are visited depth first, so that the
budget has room for a pack and for some of those above it.

In a pack, nodes stand in preorder with the heaviest child first. So a node with its heaviest child, that child's heaviest
child and so on is one run of tokens, a *chain*, with plain causal attention. All subtrees that leave a chain at one node are
one run of queries to the chain's tokens up to there, a *crossing*. No token is in more crossings than the logarithm of the
pack's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from lightning.batch.radix import Node, PrefixTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The packed tokens `[first, last)` attend to all of the packed tokens `[start, stop)`."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A place in a pack at which other packs continue: `path` are the indices of the pack's tokens that lead there, in order,
    and `packs` are the packs that continue there."""

    path: Ints
    packs: tuple[Pack, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """N tokens that go through the model at one time, after a path of `depth` tokens."""

    pieces: tuple[Node, ...]
    """Runs of tokens of the tree, in the order of the pack. A node that is longer than a pack is cut into several pieces."""
    starts: tuple[int, ...]
    """The index in the pack at which each piece begins."""
    ends: tuple[int, ...]
    """The index in the pack at which the last descendant of each piece ends."""
    chains: tuple[tuple[int, int], ...]
    crossings: tuple[Crossing, ...]
    depth: int
    branches: tuple[Branch, ...]
    largest_behind: int
    """The number of tokens of the largest pack below this one, at any distance; 0 without branches."""

    def __len__(self) -> int:
        return self.starts[-1] + len(self.pieces[-1])

    def ids(self, tree: PrefixTree) -> Ints:
        """Return the token ids of the pack, shape (N,)."""
        return np.concatenate([tree.ids[piece.start : piece.stop] for piece in self.pieces]).astype(np.int64)

    def positions(self) -> Ints:
        """Return each token's position in its row, shape (N,)."""
        return np.concatenate([np.arange(piece.depth, piece.depth + len(piece)) for piece in self.pieces])

    def seen(self) -> tuple[Ints, Ints]:
        """Return two arrays of shape (depth + N,), over the path's tokens and then the pack's: the packed tokens `[first,
        last)` attend to the token."""
        lengths = [len(piece) for piece in self.pieces]
        first = np.concatenate([np.zeros(self.depth, np.int64), np.arange(len(self))])
        last = np.concatenate([np.full(self.depth, len(self)), np.repeat(np.asarray(self.ends, np.int64), lengths)])
        return first, last


@dataclass(frozen=True, slots=True)
class Enter:
    """A move of the walk: go forward through a pack, and backward too if it has no branches."""

    pack: Pack


@dataclass(frozen=True, slots=True)
class Extend:
    """A move of the walk: add the branch's tokens to the path, for the packs that continue there."""

    pack: Pack
    branch: Branch


@dataclass(frozen=True, slots=True)
class Retract:
    """A move of the walk: take the branch's tokens off the path, and keep the gradients of their keys and values."""

    pack: Pack
    branch: Branch


@dataclass(frozen=True, slots=True)
class Leave:
    """A move of the walk: close a pack with branches, and go backward through it if there are gradients."""

    pack: Pack


Move = Enter | Extend | Retract | Leave


def moves(packs: Iterable[Pack]) -> list[Move]:
    """Return the moves of a depth-first walk over these packs and all packs below them."""
    todo: list[Move] = []
    todo.extend([Enter(pack) for pack in packs][::-1])
    made: list[Move] = []
    while todo:
        move = todo.pop()
        made.append(move)
        if isinstance(move, Enter) and move.pack.branches:
            todo.append(Leave(move.pack))
            for branch in move.pack.branches[::-1]:
                todo.append(Retract(move.pack, branch))
                todo.extend(Enter(pack) for pack in branch.packs[::-1])
                todo.append(Extend(move.pack, branch))
    return made


def pack_tree(tree: PrefixTree, needed: Sequence[bool], budget: int) -> tuple[Pack, ...]:
    """Return the topmost packs of the needed nodes of a tree; all other packs are reached through their branches. `needed` must
    be true for the parent of each needed node. `budget` is the number of tokens that may be computed at one time, at least
    2."""
    return _Packing(*_pieces(tree, needed, budget), budget).top()


def _pieces(tree: PrefixTree, needed: Sequence[bool], budget: int) -> tuple[list[Node], list[int]]:
    """Return the needed nodes, cut into pieces if they are longer than a pack, and for each piece the largest number of tokens
    in a pack of its tree."""
    roots, sizes = [0] * len(tree.nodes), [0] * len(tree.nodes)
    for index, node in enumerate(tree.nodes):
        roots[index] = index if node.parent < 0 else roots[node.parent]
        sizes[roots[index]] += len(node) if needed[index] else 0
    pieces: list[Node] = []
    limits: list[int] = []
    last = [-1] * len(tree.nodes)
    for index, node in enumerate(tree.nodes):
        if not needed[index]:
            continue
        limit = budget if sizes[roots[index]] <= budget else budget // 2
        parent = -1 if node.parent < 0 else last[node.parent]
        for start in range(node.start, node.stop, limit):
            stop = min(start + limit, node.stop)
            pieces.append(Node(start, stop, node.depth + start - node.start, parent))
            limits.append(limit)
            parent = len(pieces) - 1
        last[index] = parent
    return pieces, limits


class _Packing:
    """The cutting of the tree of pieces into connected parts, and the building of packs from them."""

    def __init__(self, pieces: list[Node], limits: list[int], budget: int) -> None:
        self._pieces, self._limits, self._budget = pieces, limits, budget
        self._children: list[list[int]] = [[] for _ in pieces]
        """Each piece's children in the same pack, heaviest first."""
        self._beyond: list[list[int]] = [[] for _ in pieces]
        """Each piece's children that begin other packs."""
        self._sizes = [len(piece) for piece in pieces]
        """The number of tokens of each piece and its descendants in the same pack."""
        self._closed = [True] * len(pieces)
        """Whether no descendant of a piece begins another pack."""
        self._cut()

    def _cut(self) -> None:
        """Decide where packs are cut. Pieces are visited from the last to the first, so that the sizes of a piece's children
        are known. If the children are too large for one pack, the heaviest begin packs of their own."""
        for index in range(len(self._pieces) - 1, -1, -1):
            children = self._children[index]
            children.sort(key=lambda child: (-self._sizes[child], child))
            size = self._sizes[index] + sum(self._sizes[child] for child in children)
            cut = 0
            while size > self._limits[index]:
                size -= self._sizes[children[cut]]
                cut += 1
            self._beyond[index], self._children[index] = children[:cut], children[cut:]
            self._sizes[index] = size
            self._closed[index] = not cut and all(self._closed[child] for child in children)
            if self._pieces[index].parent >= 0:
                self._children[self._pieces[index].parent].append(index)

    def top(self) -> tuple[Pack, ...]:
        """Build all packs and return the topmost. The packs of a branch are built before the pack that has the branch, without
        recursion."""
        roots = [index for index, piece in enumerate(self._pieces) if piece.parent < 0]
        roots.sort(key=lambda root: (-self._sizes[root], root))
        behind: dict[int, tuple[Pack, ...]] = {}
        for index in range(len(self._pieces) - 1, -1, -1):
            if self._beyond[index]:
                behind[index] = self._packs(self._beyond[index], self._limits[index], behind)
        return self._packs(roots, self._budget, behind)

    def _packs(self, roots: Sequence[int], limit: int, behind: dict[int, tuple[Pack, ...]]) -> tuple[Pack, ...]:
        """Return packs, of at most `limit` tokens each, for the parts of the tree that begin with the pieces `roots`, heaviest
        first. All these parts continue from one token. Parts that no further pack continues share a pack if they fit (first
        fit)."""
        bins: list[list[int]] = []
        room: list[int] = []
        for root in roots:
            size = self._sizes[root]
            place = next((at for at, free in enumerate(room) if free >= size), None) if self._closed[root] else None
            if place is None:
                bins.append([root])
                room.append(limit - size if self._closed[root] else 0)
            else:
                bins[place].append(root)
                room[place] -= size
        return tuple(self._pack(own, behind) for own in bins)

    def _pack(self, roots: Sequence[int], behind: dict[int, tuple[Pack, ...]]) -> Pack:
        """Return one pack of the pieces `roots` and their descendants up to the next cut, in preorder: each piece before its
        children."""
        order: list[int] = []
        todo = list(reversed(roots))
        while todo:
            order.append(todo.pop())
            todo.extend(reversed(self._children[order[-1]]))
        starts: dict[int, int] = {}
        size = 0
        for index in order:
            starts[index] = size
            size += len(self._pieces[index])
        ends = {index: starts[index] + len(self._pieces[index]) for index in order}
        for index in reversed(order):
            if self._children[index]:
                ends[index] = ends[self._children[index][-1]]
        chains, crossings = self._attention(order, starts, ends)
        branches = tuple(Branch(self._path(index, starts), behind[index]) for index in order if self._beyond[index])
        return Pack(
            pieces=tuple(self._pieces[index] for index in order),
            starts=tuple(starts.values()),
            ends=tuple(ends[index] for index in order),
            chains=chains,
            crossings=crossings,
            depth=self._pieces[roots[0]].depth,
            branches=branches,
            largest_behind=max((max(len(p), p.largest_behind) for b in branches for p in b.packs), default=0),
        )

    def _attention(
        self, order: Sequence[int], starts: dict[int, int], ends: dict[int, int]
    ) -> tuple[tuple[tuple[int, int], ...], tuple[Crossing, ...]]:
        """Return the chains `(start, stop)` and the crossings of a pack."""
        chain: dict[int, int] = {}
        chains: list[tuple[int, int]] = []
        crossings: list[Crossing] = []
        for index in order:
            chain.setdefault(index, starts[index])
            stop = starts[index] + len(self._pieces[index])
            children = self._children[index]
            if not children:
                chains.append((chain[index], stop))
                continue
            chain[children[0]] = chain[index]
            if len(children) > 1:
                crossings.append(Crossing(ends[children[0]], ends[index], chain[index], stop))
        return tuple(chains), tuple(crossings)

    def _path(self, index: int, starts: dict[int, int]) -> Ints:
        """Return the indices of the pack's tokens on the way from the root above a piece to the end of the piece."""
        parts = []
        while index in starts:
            parts.append(np.arange(starts[index], starts[index] + len(self._pieces[index])))
            index = self._pieces[index].parent
        return np.concatenate(parts[::-1])


NAME = "lightning_prefix_tree"
"""The name of this attention in `transformers`' registry."""

FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class PathLayer:
    """One layer's keys and values of the path, each (1, heads, capacity, head size), and their gradients so far."""

    keys: torch.Tensor
    values: torch.Tensor
    key_gradients: torch.Tensor
    value_gradients: torch.Tensor

    @classmethod
    def like(cls, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> PathLayer:
        """Return an empty layer for `capacity` tokens, shaped like these keys and values. Gradients are at least float32,
        because many small ones are added up."""

        def room(of: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*of.shape[:2], capacity, of.shape[3], dtype=dtype, device=of.device)

        exact = torch.promote_types(keys.dtype, torch.float32)
        return cls(room(keys, keys.dtype), room(values, values.dtype), room(keys, exact), room(values, exact))


@dataclass(slots=True)
class Attending:
    """The attention of one pass through the model, given to the model as an argument, which hands it on to each layer."""

    attend: Attend
    path: dict[int, PathLayer]
    """The path's keys and values by layer; empty if the pack has no path."""
    keep: bool
    """Whether to keep the pack's own keys and values in `own`, by layer."""
    own: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend in one layer. Queries, keys, values and result have shape (1, heads, N, head size), where grouped keys and
        values have fewer heads."""
        if self.keep:
            self.own.setdefault(layer, (key, value))  # a checkpointed layer is computed again in the backward pass
        return self.attend(query, key, value, self.path[layer] if self.path else None, scale)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PathLayer | None, float], torch.Tensor]
"""A function of queries, keys, values, the path (None if there is none) and the factor of scores to the attention's output."""

Kernel = Callable[[Pack, torch.device], Attend]
"""A function that prepares an implementation of attention for one pack."""


@contextmanager
def attending_to_paths(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, a model's forward pass takes an argument `attending`, by which each layer attends."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _registered)
    before = model.config.get_text_config()._attn_implementation  # noqa: SLF001 — transformers has no other name for it
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _registered(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attending: Attending,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that `transformers` calls in each layer. As in the SDPA function of `transformers`, further
    arguments have no effect."""
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = attending(module.layer_idx, query, key, value, scale)  # type: ignore[arg-type]
    return result.transpose(1, 2).contiguous(), None


class MaskedAttention:
    """A `Kernel` for any device, which masks scores by a table of N times (path + N)."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._depth = pack.depth
        first, last = (torch.from_numpy(of).to(device) for of in pack.seen())
        place = torch.arange(len(pack), device=device)[:, None]
        self._mask = (first <= place) & (place < last)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, path: PathLayer | None, scale: float
    ) -> torch.Tensor:
        """Return the output of attention to the pack's own tokens and to its path (None: no path), as `Attend` says."""
        if path is not None:
            key, value = with_path(key, value, path, self._depth)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=self._mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )


class PartsAttention:
    """A `Kernel` for a CPU that attends part by part. Dtypes and head sizes that torch's kernel does not take are computed by
    `MaskedAttention` instead."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._pack, self._device = pack, device
        self._masked: MaskedAttention | None = None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, path: PathLayer | None, scale: float
    ) -> torch.Tensor:
        """Return the output of attention to the pack's own tokens and to its path (None: no path), as `Attend` says."""
        if query.dtype not in FLASH_DTYPES or query.shape[-1] != value.shape[-1]:
            self._masked = self._masked or MaskedAttention(self._pack, self._device)
            return self._masked(query, key, value, path, scale)
        result: torch.Tensor = _Parts.apply(query, key, value, self._pack, path, scale)  # type: ignore[no-untyped-call]
        return result


def with_path(key: torch.Tensor, value: torch.Tensor, path: PathLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with the first `count` keys and values of the path put before them. In the backward pass the
    path's part of the gradient is added to the path's gradients."""
    keys: torch.Tensor = _Behind.apply(key, path.keys[:, :, :count], path.key_gradients[:, :, :count])  # type: ignore[no-untyped-call]
    values: torch.Tensor = _Behind.apply(value, path.values[:, :, :count], path.value_gradients[:, :, :count])  # type: ignore[no-untyped-call]
    return keys, values


class _Behind(torch.autograd.Function):
    """Concatenation of earlier tokens and the pack's own tokens. The gradient of the earlier tokens is added to the tensor
    `gradient`, since they have no graph."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, earlier: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.cat([earlier, own], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        count = ctx.gradient.shape[2]
        ctx.gradient.add_(grad[:, :, :count])
        return grad[:, :, count:], None, None


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 — the one that returns the log-sum-exp
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class _Parts(torch.autograd.Function):
    """Attention of a pack, computed part by part: its chains, its crossings and its path.

    The backward pass is at least float32: there torch's kernel for a CPU takes up to eight times as long in bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: Pack,
        path: PathLayer | None,
        scale: float,
    ) -> torch.Tensor:
        results = [
            _flash(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], 0.0, True, scale=scale) for a, b in pack.chains
        ]
        out, lse = (_joined(parts) for parts in zip(*results, strict=True))
        for part in pack.crossings:
            queries, keys = slice(part.first, part.last), slice(part.start, part.stop)
            _merge(out, lse, queries, _flash(query[:, :, queries], key[:, :, keys], value[:, :, keys], scale=scale))
        if path is not None:
            keys = slice(0, pack.depth)
            _merge(out, lse, slice(None), _flash(query, path.keys[:, :, keys], path.values[:, :, keys], scale=scale))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pack, ctx.path, ctx.scale = pack, path, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        kind, exact = query.dtype, torch.promote_types(query.dtype, torch.float32)
        query, key, value, out, grad = (tensor.to(exact) for tensor in (query, key, value, out, grad))

        def part(queries: slice, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
            own = (tensor[:, :, queries] for tensor in (grad, query))
            found: tuple[torch.Tensor, ...] = _flash_backward(
                *own, keys, values, out[:, :, queries], lse[:, :, queries], 0.0, causal, scale=ctx.scale
            )
            return found

        chains = [part(slice(a, b), key[:, :, a:b], value[:, :, a:b], True) for a, b in ctx.pack.chains]
        by_query, by_key, by_value = (_joined(parts) for parts in zip(*chains, strict=True))
        for crossing in ctx.pack.crossings:
            queries, keys = slice(crossing.first, crossing.last), slice(crossing.start, crossing.stop)
            found = part(queries, key[:, :, keys], value[:, :, keys], False)
            for total, where, more in zip((by_query, by_key, by_value), (queries, keys, keys), found, strict=True):
                total[:, :, where] += more
        if ctx.path is not None:
            keys = slice(0, ctx.pack.depth)
            keys_before, values_before = ctx.path.keys[:, :, keys].to(exact), ctx.path.values[:, :, keys].to(exact)
            found = part(slice(None), keys_before, values_before, False)
            by_query += found[0]
            ctx.path.key_gradients[:, :, keys] += found[1]
            ctx.path.value_gradients[:, :, keys] += found[2]
        return by_query.to(kind), by_key.to(kind), by_value.to(kind), None, None, None


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate results along the tokens. In memory tokens come before heads, as in the kernel's results."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


def _merge(out: torch.Tensor, lse: torch.Tensor, queries: slice, other: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Merge a result over further keys into `out` and `lse` in place, for some queries: both results are weighted by their
    share of the sum of exponentials. `other` is the further result with its log-sum-exp."""
    result, before = out[:, :, queries], lse[:, :, queries]
    total = torch.logaddexp(before, other[1])
    result.mul_((before - total).exp_().unsqueeze(-1).to(out.dtype))
    result.addcmul_(other[0], (other[1] - total).exp_().unsqueeze(-1).to(out.dtype))
    before.copy_(total)


BLOCK = 128
"""The number of queries, and of keys, in a block: the default of FlexAttention's kernels."""


KERNELS = 64
"""How many kernels of FlexAttention a process may compile: one for each dtype, head size, and with and without gradients."""


@cache
def _kernel(*, compiled: bool) -> Callable[..., torch.Tensor]:
    if not compiled:
        return torch_flex_attention
    # Beyond torch's own limit of eight kernels it would run uncompiled, with all scores in memory; `fullgraph` raises instead.
    compiled_flex = torch.compile(torch_flex_attention, dynamic=True, fullgraph=True)
    made: Callable[..., torch.Tensor] = torch._dynamo.config.patch(recompile_limit=KERNELS)(compiled_flex)  # noqa: SLF001
    return made


class FlexAttention:
    """A `Kernel` for CUDA. Tokens are padded to whole blocks, so that few different shapes have to be compiled."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self._pack, self._device = pack, device
        self._mask = block_mask(pack, device)
        self._run = _kernel(compiled=device.type == "cuda")

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, path: PathLayer | None, scale: float
    ) -> torch.Tensor:
        """Return the output of attention to the pack's own tokens and to its path (None: no path), as `Attend` says."""
        if query.dtype is torch.float64 and query.is_cuda:  # the compiled kernel has no float64
            return MaskedAttention(self._pack, self._device)(query, key, value, path, scale)
        if path is not None:
            key, value = with_path(key, value, path, self._pack.depth)
        queries, keys = self._mask.seq_lengths
        # Everything has its dtype by now; under autocast torch would compile one kernel more.
        with torch.autocast(query.device.type, enabled=False):
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
    """Return FlexAttention's mask of a pack: for each block of queries, the blocks of keys of which it attends to all or to
    some. The path's keys come before the pack's own.

    After the last token only padding attends to padding, because a query without keys has no softmax.
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
    """Return, for a table (Q, K) of blocks, the number of key blocks of each query block, (1, 1, Q), and the indices of all key
    blocks with those first, (1, 1, Q, K)."""
    count = torch.from_numpy(blocks.sum(-1).astype(np.int32)).to(device)
    which = torch.from_numpy(np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)).to(device)
    return count[None, None], which[None, None]
