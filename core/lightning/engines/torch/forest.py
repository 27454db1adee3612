"""The wanted tokens of a step on its prefix tree: where each is predicted, and what its loss is made of.

The invariant: every trained token of every row is exactly one entry, also where rows share the token (siblings that sampled
the same word): the token is computed once and has a loss for each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning.batch.digest import span_digest
from lightning.batch.radix import Node, PrefixTree, build_tree
from lightning.batch.sample import Sample
from lightning.engines.torch.logprobs import token_logprobs
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.tree import TreeWalk
from lightning.losses.protocol import TokenBatch

PASS_TOKENS = 64
"""What a pass over a node by itself is taken to cost besides its tokens, in tokens: a guess that nobody has measured, which
decides only when `auto` takes the tree."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entries:
    """N wanted tokens, ordered by `places`: where in the tree the token before each stands. `rows` and `columns` say which
    token of which row it is."""

    places: Ints
    rows: Ints
    columns: Ints
    targets: Ints
    weights: Floats
    advantages: Floats
    sampled: Floats
    temperatures: Floats | None

    def of(self, node: Node) -> slice:
        """The entries whose token before lies in a node."""
        first, last = np.searchsorted(self.places, (node.start, node.stop)).tolist()
        return slice(first, last)


def gather(samples: Sequence[Sample], lengths: Sequence[int]) -> tuple[PrefixTree, Entries]:
    """The tree of rows cut to their lengths, and the entries of their weighted tokens."""
    tree = build_tree([sample.ids[:length] for sample, length in zip(samples, lengths, strict=True)])
    columns = [np.flatnonzero(sample.weights[:length]) for sample, length in zip(samples, lengths, strict=True)]
    places = np.concatenate([tree.places(row, own - 1) for row, own in enumerate(columns)])
    order = np.argsort(places, kind="stable")
    rows = np.repeat(np.arange(len(samples)), [len(own) for own in columns])

    def collect(name: str) -> npt.NDArray[np.generic]:
        values = [getattr(sample, name)[own] for sample, own in zip(samples, columns, strict=True)]
        joined: npt.NDArray[np.generic] = np.concatenate(values)[order]
        return joined

    temperatures = np.array([sample.temperature for sample in samples], np.float32)
    return tree, Entries(
        places=places[order],
        rows=rows[order],
        columns=np.concatenate(columns)[order],
        targets=collect("ids").astype(np.int64),
        weights=collect("weights").astype(np.float32),
        advantages=collect("advantages").astype(np.float32),
        sampled=collect("logprobs").astype(np.float32),
        temperatures=None if bool((temperatures == 1.0).all()) else temperatures[rows[order]],
    )


def tree_pays(samples: Sequence[Sample], lengths: Sequence[int]) -> bool:
    """Whether rows share so many tokens that computing these once is worth more passes over shorter pieces."""
    tree = build_tree([sample.ids[:length] for sample, length in zip(samples, lengths, strict=True)])
    inner = len({node.parent for node in tree.nodes})
    return sum(lengths) > len(tree.ids) + inner * PASS_TOKENS


@dataclass(slots=True)
class Forest:
    """One step's tree and entries, and what its tensors held when they were used."""

    lm: CausalLM
    samples: Sequence[Sample]
    tree: PrefixTree
    entries: Entries
    seen_targets: Ints
    seen_sampled: Floats

    @classmethod
    def of(cls, lm: CausalLM, samples: Sequence[Sample], lengths: Sequence[int]) -> Forest:
        """The forest of rows cut to their lengths; each has a weighted token."""
        tree, entries = gather(samples, lengths)
        count = len(entries.targets)
        return cls(lm, samples, tree, entries, np.full(count, -1, np.int64), np.full(count, np.inf, np.float32))

    def accumulate(self, budget: int, loss_of: Callable[[TokenBatch], torch.Tensor]) -> int:
        """Add the gradient of all entries' losses to the parameters; returns how many tokens were computed."""

        def visit(hidden: torch.Tensor, batch: Sequence[Node]) -> torch.Tensor | None:
            parts = [self.entries.of(node) for node in batch]
            chosen = np.concatenate([np.arange(part.start, part.stop) for part in parts])
            if not len(chosen):
                return None
            before = np.concatenate([
                row * hidden.shape[1] + self.entries.places[part] - node.start
                for row, (node, part) in enumerate(zip(batch, parts, strict=True))
            ])  # fmt: skip
            return loss_of(self._batch(hidden.flatten(0, 1), before, chosen))

        return TreeWalk(self.lm, self.tree, self._needed(), budget, visit).run()

    def digests(self) -> dict[tuple[str, int, int], str]:
        """The fingerprint of each span, from the tensors that the losses were computed on."""
        found = {}
        order = np.lexsort((self.entries.columns, self.entries.rows))
        rows, columns = self.entries.rows[order], self.entries.columns[order]
        targets, sampled = self.seen_targets[order], self.seen_sampled[order]
        starts = np.searchsorted(rows, np.arange(len(self.samples) + 1)).tolist()
        for row, sample in enumerate(self.samples):
            own = slice(starts[row], starts[row + 1])
            for span in sample.spans:
                first, last = (starts[row] + np.searchsorted(columns[own], (span.start, span.stop))).tolist()
                key = (span.rollout, span.attempt, span.seq)
                found[key] = span_digest(targets[first:last].astype(np.int32), sampled[first:last])
        return found

    def _needed(self) -> list[bool]:
        """Whether each node has entries at or below it."""
        needed = [part.stop > part.start for part in map(self.entries.of, self.tree.nodes)]
        for index in range(len(needed) - 1, -1, -1):
            parent = self.tree.nodes[index].parent
            if needed[index] and parent >= 0:
                needed[parent] = True
        return needed

    def _batch(self, states: torch.Tensor, before: Ints, chosen: Ints) -> TokenBatch:
        """The tokens `chosen` of the entries, predicted from `states[before]`."""
        entries, device = self.entries, self.lm.device
        targets = torch.from_numpy(entries.targets[chosen]).to(device)
        sampled = torch.from_numpy(entries.sampled[chosen]).to(device)
        heat = None if entries.temperatures is None else torch.from_numpy(entries.temperatures[chosen]).to(device)
        with self.lm.computing():
            wanted = states.index_select(0, torch.from_numpy(before).to(device))
            logprobs, entropy = token_logprobs(wanted, targets, heat, self.lm.logits, self.lm.vocab_size)
        self.seen_targets[chosen] = targets.cpu().numpy()
        self.seen_sampled[chosen] = sampled.cpu().numpy()
        advantages = torch.from_numpy(entries.advantages[chosen]).to(device)
        weights = torch.from_numpy(entries.weights[chosen]).to(device)
        return token_batch(logprobs, entropy, sampled, advantages, weights)


def token_batch(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
) -> TokenBatch:
    """What a loss function sees, all (N,); where `sampled` is NaN the old logprobs are the current ones."""
    old = sampled.to(logprobs.dtype)
    has_old = ~old.isnan()
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.where(has_old, old, logprobs.detach()),
        advantages=advantages.to(logprobs.dtype),
        weights=weights.to(logprobs.dtype),
        entropy=entropy,
        has_old=has_old,
    )
