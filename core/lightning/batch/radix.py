"""Rows of token ids as a prefix tree, in which every shared prefix occurs once.

The invariant: each distinct prefix of the rows is exactly one token of the tree, so the tree has as few tokens as possible. The
tree depends on the set of rows alone, not on their order.

    rows                                   nodes
    P R1 O1 R2                             P ─┬─ R1 ─┬─ O1 R2
    P R1 O2 R3                                │      └─ O2 R3
    P R4                                      └─ R4

The code compares whole arrays, never single tokens: it sorts rows as bytes, so that rows with a common prefix are neighbours,
and each row adds to the tree its tokens after the prefix that it shares with the row before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.batch.sample import IntArray
from lightning.types import shared_prefix

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens without a branch: `ids[start:stop]` of its tree, at positions `depth`, `depth + 1`, ... of each row
    that passes through it. `parent` is -1 for a root; parents stand before their children in `PrefixTree.nodes`."""

    start: int
    stop: int
    depth: int
    parent: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The prefix tree (or forest) of some rows. `ids`, shape (U,), are its tokens; `nodes` are the unbranched runs of these."""

    ids: IntArray
    nodes: tuple[Node, ...]
    _chunks: tuple[_Chunk, ...]
    _chunk_of: tuple[int, ...]

    def places(self, row: int, tokens: Places) -> Places:
        """Return the indices in `ids` of the tokens whose indices in the row number `row` are `tokens`; both have shape
        (N,)."""
        found = np.empty(len(tokens), dtype=np.int64)
        chunk, end = self._chunks[self._chunk_of[row]], np.iinfo(np.int64).max
        while True:
            inside = (tokens >= chunk.depth) & (tokens < end)
            found[inside] = tokens[inside] + (chunk.start - chunk.depth)
            if chunk.depth == 0:
                return found
            end, chunk = chunk.depth, self._chunks[chunk.parent]


@dataclass(slots=True)
class _Chunk:
    """The tokens `ids[start:stop]` of the tree that a row adds, from position `depth` of the row on. `cuts` are the depths at
    which later rows branch off."""

    start: int
    stop: int
    depth: int
    parent: int
    cuts: list[int]

    @property
    def end(self) -> int:
        """The depth one behind the chunk's last token."""
        return self.depth + self.stop - self.start


def build_tree(rows: Sequence[IntArray]) -> PrefixTree:
    """Return the prefix tree of rows of int32 token ids; no row may be empty."""
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    chunks: list[_Chunk] = []
    chunk_of = [0] * len(rows)
    added: list[IntArray] = []
    path: list[int] = []
    size = 0
    for place, index in enumerate(order):
        row = rows[index]
        shared = shared_prefix(keys[order[place - 1]], keys[index], row.itemsize) if place else 0
        while path and chunks[path[-1]].depth >= shared:
            path.pop()
        parent = path[-1] if path else -1
        added.append(row[shared:])
        start, size = size, size + len(row) - shared
        if path and shared == chunks[parent].end:  # the row extends its neighbour or equals it: no branch
            chunks[parent].stop = size
            chunk_of[index] = parent
            continue
        if path:
            chunks[parent].cuts.append(shared)
        chunks.append(_Chunk(start, size, shared, parent, []))
        chunk_of[index] = len(chunks) - 1
        path.append(chunk_of[index])
    ids = np.concatenate(added) if added else np.zeros(0, np.int32)
    return PrefixTree(ids, _nodes(chunks), tuple(chunks), tuple(chunk_of))


def _nodes(chunks: Sequence[_Chunk]) -> tuple[Node, ...]:
    """Cut each chunk at the depths where other chunks branch off. Parents stand before their children, as in `chunks`."""
    nodes: list[Node] = []
    ends: dict[tuple[int, int], int] = {}  # the node of a chunk that ends at a depth
    for number, chunk in enumerate(chunks):
        parent = -1 if chunk.parent < 0 else ends[chunk.parent, chunk.depth]
        depth = chunk.depth
        for cut in [*sorted(set(chunk.cuts)), chunk.end]:
            start = chunk.start + depth - chunk.depth
            nodes.append(Node(start, start + cut - depth, depth, parent))
            parent = ends[number, cut] = len(nodes) - 1
            depth = cut
    return tuple(nodes)
