"""The rows of a step as their prefix tree: where in it each wanted token is predicted and each state is valued.

The invariant: a token that rows share is computed once, and has an entry (so a loss) for each of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightning.batch.radix import Node, PrefixTree, build_tree
from lightning.batch.sample import Sample
from lightning.engines.torch.layout import (
    Entries,
    Ints,
    Part,
    States,
    Tokens,
    Visit,
    failing,
    reordered,
    trained_tokens,
)
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.rows import name
from lightning.engines.torch.tree import TreeWalk

PASS_TOKENS = 64
"""What a pass over a node by itself is taken to cost besides its tokens, in tokens: a guess that nobody has measured, which
decides only when `auto` takes the tree."""


@dataclass(frozen=True, slots=True)
class Forest:
    """A `Layout`. Entries are in the order of their places: where in the tree the hidden state stands that each needs."""

    samples: Sequence[Sample]
    lengths: Sequence[int]
    tree: PrefixTree
    tokens: Tokens
    token_places: Ints
    states: States
    state_places: Ints

    @classmethod
    def of(cls, samples: Sequence[Sample], lengths: Sequence[int], tokens: Tokens, states: States) -> Forest:
        """The forest of rows cut to their lengths."""
        tree = build_tree([sample.ids[:length] for sample, length in zip(samples, lengths, strict=True)])
        tokens, token_places = _placed(tree, tokens, tokens.columns - 1)
        states, state_places = _placed(tree, states, states.columns)
        return cls(samples, lengths, tree, tokens, token_places, states, state_places)

    @property
    def pays(self) -> bool:
        """Whether rows share so many tokens that computing these once is worth more passes over shorter pieces."""
        inner = len({node.parent for node in self.tree.nodes})
        return sum(self.lengths) > len(self.tree.ids) + inner * PASS_TOKENS

    def again(self, samples: Sequence[Sample]) -> Forest:
        """The same tree, of whose rows other numbers are known now."""
        tokens = trained_tokens(samples)
        tokens, places = _placed(self.tree, tokens, tokens.columns - 1)
        return replace(self, samples=samples, tokens=tokens, token_places=places)

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """One pass over the nodes that have entries at or below them."""
        what = f"{len(self.samples)} rows ({name(self.samples[0])} to {name(self.samples[-1])})"

        def visit_nodes(hidden: torch.Tensor, batch: Sequence[Node]) -> torch.Tensor | None:
            tokens, before = _entries(self.token_places, batch, hidden.shape[1])
            states, at = _entries(self.state_places, batch, hidden.shape[1])
            if not len(tokens) and not len(states):
                return None
            return visit(Part(hidden.flatten(0, 1), tokens, before, states, at, what))

        with failing("pass over the tree", what):
            return TreeWalk(lm, self.tree, self._needed(), budget, visit_nodes).run()

    def _needed(self) -> list[bool]:
        """Whether each node has entries at or below it."""
        places = np.sort(np.concatenate([self.token_places, self.state_places]))
        edges = np.array([(node.start, node.stop) for node in self.tree.nodes], np.int64).reshape(-1, 2)
        found = np.searchsorted(places, edges)
        needed: list[bool] = (found[:, 1] > found[:, 0]).tolist()
        for index in range(len(needed) - 1, -1, -1):
            parent = self.tree.nodes[index].parent
            if needed[index] and parent >= 0:
                needed[parent] = True
        return needed


def _placed(tree: PrefixTree, entries: Entries, columns: Ints) -> tuple[Entries, Ints]:
    """Entries in the order of their places, and these; they need the hidden states at `columns` of their rows."""
    rows, starts = np.unique(entries.rows, return_index=True)
    parts = np.split(columns, starts[1:]) if len(rows) else []
    found: list[Ints] = [tree.places(row, own) for row, own in zip(rows.tolist(), parts, strict=True)]
    places = np.concatenate([np.zeros(0, np.int64), *found])
    order = np.argsort(places, kind="stable")
    return reordered(entries, order), places[order]


def _entries(places: Ints, batch: Sequence[Node], width: int) -> tuple[Ints, Ints]:
    """Which entries need a hidden state of some nodes, and where it stands in a (B * `width`) tensor of these."""
    firsts, lasts = (np.searchsorted(places, [getattr(node, edge) for node in batch]) for edge in ("start", "stop"))
    chosen = [np.arange(first, last) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    starts = np.repeat([node.start - row * width for row, node in enumerate(batch)], [len(own) for own in chosen])
    entries = np.concatenate(chosen)
    return entries, places[entries] - starts
