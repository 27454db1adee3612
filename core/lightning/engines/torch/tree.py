"""The tree step: every unique token of a step goes forward and backward once, however many rows share it.

The invariant: the gradient is exactly that of the rows computed one by one. A node of the prefix tree attends to its own
tokens and to the keys and values of its ancestors, which are cut from their graph; what its descendants' losses say about
those keys and values is added up there, and goes on through the ancestor when all its descendants are done. So only the
graphs of one path from the root exist at any time, and memory grows with the longest path, not with the tree
("Tree Training", arXiv 2511.00413, says why the sum over branches is what a shared token's gradient is).

Nodes without descendants that have the same parent are computed together, padded on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning.batch.radix import Node, PrefixTree
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.rows import plan

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of some tokens, one pair for each layer, each (B, heads, tokens, head size)."""

Visit = Callable[[torch.Tensor, Sequence[Node]], torch.Tensor | None]
"""Given the hidden states (B, T, H) of B nodes, the loss of the tokens that follow from them; None where nothing does."""


class PathCache:
    """What a `transformers` model takes for its cache: attention sees the ancestors' keys and values before its own."""

    is_compileable = False

    def __init__(self, ancestors: Sequence[Layers]) -> None:
        self._ancestors = ancestors
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer, with keys that have their positions already."""
        self.own.setdefault(layer, (key, value))  # a checkpointed layer comes again in the backward pass
        if not self._ancestors:
            return key, value
        whole = []
        for place, own in enumerate((key, value)):
            earlier = [layers[layer][place].expand(own.shape[0], -1, -1, -1) for layers in self._ancestors]
            whole.append(torch.cat([*earlier, own], dim=2))
        return whole[0], whole[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the node."""
        return sum(layers[layer_idx][0].shape[2] for layers in self._ancestors)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens are attended to, and at which position they begin."""
        return query_length + self.get_seq_length(layer_idx), 0

    def layers(self) -> Layers:
        """The node's own keys and values, in the order of the layers."""
        return [self.own[layer] for layer in sorted(self.own)]


def why_no_tree(lm: CausalLM) -> str:
    """Why a model cannot be computed over a tree, or nothing when it can.

    Keys and values must be all that one token needs of another, and each token must need those of all tokens before it. That
    is tried on a few tokens; a window that is longer than these is read from the configuration.
    """
    config = lm.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"its layers are of the kinds {', '.join(sorted(kinds))}"
    if not kinds and getattr(config, "sliding_window", None):
        return f"it attends to a window of {config.sliding_window} tokens"
    if config._attn_implementation != "sdpa":  # noqa: SLF001 — transformers has no other name for it
        return f"its attention is {config._attn_implementation!r}, not 'sdpa'"  # noqa: SLF001
    if lm.model.is_gradient_checkpointing:
        return "transformers gives checkpointed layers no keys and values of earlier tokens"
    ids = torch.arange(6, device=lm.device)[None] % lm.vocab_size
    try:
        with lm.evaluating(), lm.computing():
            whole = lm.hidden(ids)
            first = PathCache(())
            lm.hidden_after(ids[:, :3], 0, first)
            second = lm.hidden_after(ids[:, 3:], 3, PathCache((first.layers(),)))
    except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        return f"its layers do not take the keys and values of earlier tokens ({error})"
    tolerance = 1e-4 if whole.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(whole[:, 3:], second, rtol=tolerance, atol=tolerance):
        return "its hidden states depend on more than the keys and values of earlier tokens"
    return ""


@dataclass(frozen=True, slots=True)
class TreeWalk:
    """One pass over a tree. `visit` is called once for each node that has wanted tokens at or below it."""

    lm: CausalLM
    tree: PrefixTree
    needed: Sequence[bool]
    budget: int
    visit: Visit

    def run(self) -> int:
        """Accumulate the gradient of every visited node; returns the tokens computed, padding included."""
        children: list[list[int]] = [[] for _ in range(len(self.tree.nodes) + 1)]
        for index, node in enumerate(self.tree.nodes):
            if self.needed[index]:
                children[node.parent].append(index)  # -1, the roots' parent, is the last list
        return self._descend(children[-1], children, (), 0)

    def _descend(
        self, siblings: Sequence[int], children: Sequence[Sequence[int]], ancestors: tuple[Layers, ...], length: int
    ) -> int:
        """Siblings and all below them; `length` is the number of tokens before them."""
        nodes = self.tree.nodes
        leaves = [index for index in siblings if not children[index]]
        computed = 0
        for places in plan([length + len(nodes[index]) for index in leaves], self.budget):
            batch = [nodes[leaves[place]] for place in places]
            hidden, _ = self._forward(batch, ancestors, length)
            computed += hidden.shape[0] * hidden.shape[1]
            loss = self.visit(hidden, batch)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        for index in siblings:
            if children[index]:
                computed += self._through(index, children, ancestors, length)
        return computed

    def _through(
        self, index: int, children: Sequence[Sequence[int]], ancestors: tuple[Layers, ...], length: int
    ) -> int:
        """A node with descendants: forward, then they, then backward with what they said about its keys and values."""
        node = self.tree.nodes[index]
        hidden, own = self._forward([node], ancestors, length)
        cut: Layers = [(key.detach().requires_grad_(), value.detach().requires_grad_()) for key, value in own]
        loss = self.visit(hidden, [node])
        computed = len(node) + self._descend(children[index], children, (*ancestors, cut), length + len(node))
        outputs: list[torch.Tensor] = [] if loss is None else [loss]
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        for graph, leaf in zip(own, cut, strict=True):
            for output, seen in zip(graph, leaf, strict=True):
                if seen.grad is not None:
                    outputs.append(output)
                    gradients.append(seen.grad)
        torch.autograd.backward(outputs, gradients)
        return computed

    def _forward(
        self, batch: Sequence[Node], ancestors: tuple[Layers, ...], length: int
    ) -> tuple[torch.Tensor, Layers]:
        """Hidden states (B, T, H) of nodes at one depth, and their keys and values."""
        width = max(len(node) for node in batch)
        ids = np.zeros((len(batch), width), np.int64)
        for row, node in enumerate(batch):
            ids[row, : len(node)] = self.tree.ids[node.start : node.stop]
        cache = PathCache(ancestors)
        with self.lm.computing():
            hidden = self.lm.hidden_after(torch.from_numpy(ids).to(self.lm.device), length, cache)
        return hidden, cache.layers()
