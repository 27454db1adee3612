"""The rows of a step as their prefix tree: where in it each wanted token is predicted and each state is valued.

The invariant: a token that rows share is computed once, and has an entry (so a loss) for each of its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightning.batch.radix import Node, PrefixTree, build_tree
from lightning.batch.sample import Sample
from lightning.engines.rows import name
from lightning.engines.tokens import Entries, Ints, States, Tokens, reordered, trained_tokens
from lightning.engines.torch.layout import LayoutPart, Visit, failing
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.tree import TreeWalk

LEAST_TOKENS = 64
"""The smallest budget that a shortage of memory leads to: passes over fewer tokens need hardly less."""

CPU_BYTES = 5 << 28
"""What the activations of a pass may take on a CPU. More makes it no faster there (SmolLM2-135M: as fast with 1,024 tokens at
one time as with 8,192), and fresh memory is slow."""

RUN_TOKENS = 3
"""What a run of tokens with attention of its own costs besides its tokens, in tokens: up to 3.8 where runs have 32 tokens,
nothing where they have 256, in a model of 4 layers of size 256 on a CPU (`tests/bench/bench_tree.py`)."""


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
        """Whether rows share so many tokens that computing these once is worth attending run by run."""
        return sum(self.lengths) > len(self.tree.ids) + len(self.tree.nodes) * RUN_TOKENS

    @property
    def least(self) -> int:
        """Rows are cut into pieces as small as this."""
        return LEAST_TOKENS

    @property
    def least_text(self) -> str:
        """What is computed at one time then, for messages."""
        return f"{self.least} tokens at a time, though longer rows are computed in pieces"

    def again(self, samples: Sequence[Sample]) -> Forest:
        """The same tree, of whose rows other numbers are known now."""
        tokens = trained_tokens(samples)
        tokens, places = _placed(self.tree, tokens, tokens.columns - 1)
        return replace(self, samples=samples, tokens=tokens, token_places=places)

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """One pass over the nodes that have entries at or below them."""
        what = f"{len(self.samples)} rows ({name(self.samples[0])} to {name(self.samples[-1])})"

        def visit_runs(hidden: torch.Tensor, runs: Sequence[Node]) -> torch.Tensor | None:
            tokens, before = _entries(self.token_places, runs)
            states, at = _entries(self.state_places, runs)
            if not len(tokens) and not len(states):
                return None
            return visit(LayoutPart(hidden, tokens, before, states, at, what))

        with failing("pass over the tree", what):
            return TreeWalk(lm, self.tree, self._needed(), min(budget, _affordable(lm)), visit_runs).run()

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


def _affordable(lm: CausalLM) -> int:
    """How many tokens' activations `CPU_BYTES` hold, counted for the usual layer in float32: ten vectors of the model's width
    and four of its inner width; two of the model's with gradient checkpointing. Without a limit on other devices."""
    if lm.device.type != "cpu":
        return sys.maxsize
    config = lm.model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = 2 * config.hidden_size if lm.model.is_gradient_checkpointing else 10 * config.hidden_size + 4 * inner
    return max(LEAST_TOKENS, CPU_BYTES // int(4 * config.num_hidden_layers * widths))


def _placed(tree: PrefixTree, entries: Entries, columns: Ints) -> tuple[Entries, Ints]:
    """Entries in the order of their places, and these; they need the hidden states at `columns` of their rows."""
    rows, starts = np.unique(entries.rows, return_index=True)
    parts = np.split(columns, starts[1:]) if len(rows) else []
    found: list[Ints] = [tree.places(row, own) for row, own in zip(rows.tolist(), parts, strict=True)]
    places = np.concatenate([np.zeros(0, np.int64), *found])
    order = np.argsort(places, kind="stable")
    return reordered(entries, order), places[order]


def _entries(places: Ints, runs: Sequence[Node]) -> tuple[Ints, Ints]:
    """Which entries need a hidden state of some runs of tokens, and where it stands among the states of these."""
    firsts, lasts = (np.searchsorted(places, [getattr(run, edge) for run in runs]) for edge in ("start", "stop"))
    chosen = [np.arange(first, last) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    before = np.cumsum([0, *(len(run) for run in runs)])[:-1]
    shifts = np.repeat(before - [run.start for run in runs], [len(own) for own in chosen])
    entries = np.concatenate(chosen)
    return entries, places[entries] + shifts
