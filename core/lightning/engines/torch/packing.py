"""How the tokens of a prefix tree are laid out in packs: what goes through the model at one time, and in which order.

The invariant: every needed token is in exactly one pack; a pack holds at most its share of the budget; and the tokens that a
token may attend to are those before it in its own pack whose node is an ancestor of its node (or is it), and the path that
leads to the pack.

A tree that fits the budget is one pack, together with other such trees. A larger one is cut, from its leaves upwards, into
as few connected packs of half the budget as there can be (Kundu and Misra, "A linear tree partitioning algorithm", SIAM J.
Comput. 1977), and these are visited depth first, so that the budget has room for a pack and for some of those above it.

In a pack, nodes stand in preorder with the heaviest child first. So a node with its heaviest child, that child's heaviest
child and so on is one run of tokens, a *chain*, with plain causal attention; all subtrees that leave a chain at one node are
one run of queries for the chain's tokens up to there, a *crossing*; and no token is in more crossings than the logarithm of
the pack's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.batch.radix import Node, PrefixTree

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Packed tokens `first` to `last` attend to all of the packed tokens `start` to `stop`."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Branch:
    """Where other packs go on behind a pack: `path` are the packed tokens that lead there, in order, without those before
    the pack."""

    path: Ints
    packs: tuple[Pack, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """N tokens that go through the model at one time, behind `depth` tokens of their path."""

    pieces: tuple[Node, ...]
    """Runs of tokens of the tree, in packed order. A node that is longer than a pack is cut into several."""
    starts: tuple[int, ...]
    """Where each piece stands in the pack."""
    ends: tuple[int, ...]
    """Where the last descendant of each piece ends in the pack."""
    chains: tuple[tuple[int, int], ...]
    crossings: tuple[Crossing, ...]
    depth: int
    branches: tuple[Branch, ...]
    largest_behind: int
    """Tokens of the largest pack that goes on behind it, at any distance; 0 without branches."""

    def __len__(self) -> int:
        return self.starts[-1] + len(self.pieces[-1])

    def ids(self, tree: PrefixTree) -> Ints:
        """(N,) token ids."""
        return np.concatenate([tree.ids[piece.start : piece.stop] for piece in self.pieces]).astype(np.int64)

    def positions(self) -> Ints:
        """(N,) how many tokens stand before each in its row."""
        return np.concatenate([np.arange(piece.depth, piece.depth + len(piece)) for piece in self.pieces])

    def seen(self) -> tuple[Ints, Ints]:
        """(depth + N,) each: the path's tokens and then the pack's are seen by the packed tokens from the one number up to,
        but without, the other."""
        lengths = [len(piece) for piece in self.pieces]
        first = np.concatenate([np.zeros(self.depth, np.int64), np.arange(len(self))])
        last = np.concatenate([np.full(self.depth, len(self)), np.repeat(np.asarray(self.ends, np.int64), lengths)])
        return first, last


@dataclass(frozen=True, slots=True)
class Enter:
    """Forward, and backward too where the pack has no branches."""

    pack: Pack


@dataclass(frozen=True, slots=True)
class Extend:
    """The branch's tokens join the path, for the packs that follow."""

    pack: Pack
    branch: Branch


@dataclass(frozen=True, slots=True)
class Retract:
    """They leave it again, with what was said about them."""

    pack: Pack
    branch: Branch


@dataclass(frozen=True, slots=True)
class Leave:
    """Done with a pack with branches: backward through it, where there are gradients."""

    pack: Pack


Move = Enter | Extend | Retract | Leave


def moves(packs: Iterable[Pack]) -> list[Move]:
    """The walk over packs and all that goes on behind them, depth first."""
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
    """The packs that stand first in the needed nodes of a tree; the others go on behind these. `needed` contains the parent
    of each needed node; `budget` is the number of tokens that may be computed at one time, at least 2."""
    return _Packing(*_pieces(tree, needed, budget), budget).top()


def _pieces(tree: PrefixTree, needed: Sequence[bool], budget: int) -> tuple[list[Node], list[int]]:
    """Needed nodes, cut where they are longer than a pack, and how many tokens a pack of each one's tree may have."""
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
    """Cuts the pieces' tree and builds packs from its parts."""

    def __init__(self, pieces: list[Node], limits: list[int], budget: int) -> None:
        self._pieces, self._limits, self._budget = pieces, limits, budget
        self._children: list[list[int]] = [[] for _ in pieces]
        """Those in the same pack, heaviest first."""
        self._beyond: list[list[int]] = [[] for _ in pieces]
        """Those that begin other packs."""
        self._sizes = [len(piece) for piece in pieces]
        """Tokens of each piece and its descendants in the same pack."""
        self._closed = [True] * len(pieces)
        """Whether no descendant begins another pack."""
        self._cut()

    def _cut(self) -> None:
        """Children come behind their parents, so from the last to the first each piece knows its children's sizes. Where
        they are too many for one pack, the heaviest begin their own."""
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
        """All packs. Those behind a branch are built before the pack that the branch leaves, without recursion."""
        roots = [index for index, piece in enumerate(self._pieces) if piece.parent < 0]
        roots.sort(key=lambda root: (-self._sizes[root], root))
        behind: dict[int, tuple[Pack, ...]] = {}
        for index in range(len(self._pieces) - 1, -1, -1):
            if self._beyond[index]:
                behind[index] = self._packs(self._beyond[index], self._limits[index], behind)
        return self._packs(roots, self._budget, behind)

    def _packs(self, roots: Sequence[int], limit: int, behind: dict[int, tuple[Pack, ...]]) -> tuple[Pack, ...]:
        """Packs for parts of the tree that leave it at one token, heaviest first. Parts that nothing goes on behind share
        one where they fit (first fit)."""
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
        """Some trees of connected pieces as one pack, in preorder."""
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
        """Chains and crossings of a pack."""
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
        """Packed tokens from the first piece of a pack to the end of one of its pieces."""
        parts = []
        while index in starts:
            parts.append(np.arange(starts[index], starts[index] + len(self._pieces[index])))
            index = self._pieces[index].parent
        return np.concatenate(parts[::-1])
