"""The tree step: every unique token of a step goes forward and backward once, however many rows share it.

The invariant: the gradient is exactly that of the rows computed one by one. A pack of tokens attends to itself and to the
keys and values of its path, which are not part of its graph. The gradients of its losses with respect to these are added up
beside them, and go backward through the packs above once all packs below those are done. So memory grows with the budget
(activations) and with the longest path (keys, values and their gradients), not with the tree. "Tree Training" (arXiv
2511.00413) shows that a shared token's gradient is the sum over its branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lightning.batch.radix import Node, PrefixTree, build_tree
from lightning.engines.sameness import CONTROL_SHARE, ROUNDING, moved
from lightning.engines.step import needing_room
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.path_attention import (
    Attending,
    Branch,
    Enter,
    Extend,
    FlexAttention,
    Kernel,
    Leave,
    MaskedAttention,
    Pack,
    PartsAttention,
    PathLayer,
    Retract,
    attending_to_paths,
    moves,
    pack_tree,
)
from lightning.errors import EngineError

Visit = Callable[[torch.Tensor, Sequence[Node]], torch.Tensor | None]
"""A function from the hidden states (N, H) of some runs of tokens, one run after another, to the loss of the tokens that they
predict; None if there is none."""


def kernel_for(device: torch.device) -> Kernel:
    """Return the implementation of attention that is fastest on a device."""
    if device.type == "cpu":
        return PartsAttention
    return FlexAttention if device.type == "cuda" else MaskedAttention


TRIED = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 6, 7), (0, 1, 8))
"""The rows that a model is tested on; the numbers are indices into a list of tokens of its vocabulary."""


def why_no_tree(lm: CausalLM) -> str:
    """Return why a model cannot be computed over a tree, or "" if it can.

    A token may depend on earlier tokens only through their keys and values, and must attend to all of them. That is tested on a
    few tokens, by comparing their hidden states in a tree and in rows; the allowed difference is a share of that made by a
    control, rows with another token at one place. A window that is longer than these rows is found in the configuration.
    """
    config = lm.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention"}:
        return f"it has layers of the kind {', '.join(sorted(others))}"
    if not kinds and getattr(config, "sliding_window", None):
        return f"it attends to a window of {config.sliding_window} tokens"
    if config._attn_implementation != "sdpa":  # noqa: SLF001 — transformers has no other name for it
        return f"its attention is {config._attn_implementation!r}, not 'sdpa'"  # noqa: SLF001
    tokens = (np.arange(1, 11) * lm.vocab_size // 11).astype(np.int32)  # the lowest ids are often special (padding)
    rows = [tokens[list(row)] for row in TRIED]
    changed_rows = [np.where(np.arange(len(row)) == 1, tokens[9], row) for row in rows]
    try:
        with needing_room("trying the tree step on a few tokens"):
            found = _tree_states(lm, rows)
    except EngineError:
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        return f"its layers do not take the keys and values of earlier tokens ({error})"
    whole, control = _row_states(lm, rows), _row_states(lm, changed_rows)
    difference = float(torch.cat([moved(*pair) for pair in zip(found, whole, strict=True)]).max())
    changed = float(torch.cat([moved(*pair)[2:] for pair in zip(control, whole, strict=True)]).mean())
    if difference <= min(ROUNDING[lm.dtype], CONTROL_SHARE * changed):
        return ""
    return (
        "its hidden states depend on more than the keys and values of earlier tokens (the tree changes them by "
        f"{difference:.1e} of their norm, another context token by {changed:.1e})"
    )


def _tree_states(lm: CausalLM, rows: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
    """Return the hidden states (T, H) of each row, computed over the tree of all rows."""
    tree = build_tree(rows)
    found: dict[int, torch.Tensor] = {}

    def collect(hidden: torch.Tensor, pieces: Sequence[Node]) -> None:
        places = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        found.update(zip(places.tolist(), hidden, strict=True))

    with lm.evaluating():
        TreeWalk(lm, tree, [True] * len(tree.nodes), 4, collect).run()  # a budget so small that a path is needed
    places = [tree.places(row, np.arange(len(ids))).tolist() for row, ids in enumerate(rows)]
    return [torch.stack([found[place] for place in own]) for own in places]


def _row_states(lm: CausalLM, rows: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
    """Return the hidden states (T, H) of each row, computed alone."""
    with lm.evaluating(), lm.computing():
        return [lm.hidden(torch.from_numpy(row).long()[None].to(lm.device))[0] for row in rows]


@dataclass(slots=True)
class _Open:
    """A pack whose packs below are not done yet. `own` are its keys and values by layer, `gradients` their gradients. If `held`
    is false, its graph was not kept and it will be computed again; it then has no `loss` yet."""

    own: dict[int, tuple[torch.Tensor, torch.Tensor]]
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor]]
    held: bool
    loss: torch.Tensor | None = None


@dataclass(slots=True)
class TreeWalk:
    """One pass over a tree. `visit` gets the hidden state of each needed token once, those of many tokens at a time.

    `needed` says of each node whether there are wanted tokens at or below it. About `budget` tokens are computed or have their
    activations kept at one time; a pack whose activations do not fit is computed a second time for its backward pass. Without
    gradients there is no backward pass.
    """

    lm: CausalLM
    tree: PrefixTree
    needed: Sequence[bool]
    budget: int
    visit: Visit
    _path: dict[int, PathLayer] = field(default_factory=dict, init=False)
    _capacity: int = field(default=0, init=False)
    _open: dict[int, _Open] = field(default_factory=dict, init=False)
    _held: int = field(default=0, init=False)

    def run(self) -> int:
        """Run the pass, adding up the gradients of the losses that `visit` returns. Returns the number of needed tokens, each
        counted once even if it was computed twice."""
        budget = max(2, self.budget)
        todo = moves(pack_tree(self.tree, self.needed, budget))
        ends = [move.pack.depth + len(move.branch.path) for move in todo if isinstance(move, Extend)]
        self._capacity, computed = max(ends, default=0), 0
        with attending_to_paths(self.lm.model):
            for move in todo:
                match move:
                    case Enter(pack):
                        self._enter(pack, budget)
                        computed += len(pack)
                    case Extend(pack, branch):
                        self._extend(pack, branch)
                    case Retract(pack, branch) if torch.is_grad_enabled():
                        self._retract(pack, branch)
                    case Leave(pack):
                        opened = self._open.pop(id(pack))
                        if torch.is_grad_enabled():
                            self._leave(pack, opened)
        return computed

    def _enter(self, pack: Pack, budget: int) -> None:
        """Go forward through a pack. A pack without branches goes backward at once; others stay open until `_leave`."""
        if not pack.branches:
            loss = self.visit(self._forward(pack, keep=False)[0], pack.pieces)
            if loss is not None and torch.is_grad_enabled():
                loss.backward()  # type: ignore[no-untyped-call]
            return
        held = torch.is_grad_enabled() and self._held + len(pack) + pack.largest_behind <= budget
        with torch.set_grad_enabled(held):
            hidden, own = self._forward(pack, keep=True)
        opened = _Open(own, {}, held)
        if held or not torch.is_grad_enabled():
            opened.loss = self.visit(hidden, pack.pieces)
        self._held += len(pack) if held else 0
        self._open[id(pack)] = opened

    def _extend(self, pack: Pack, branch: Branch) -> None:
        """Put a branch's keys and values on the path."""
        place = slice(pack.depth, pack.depth + len(branch.path))
        chosen = torch.from_numpy(branch.path).to(self.lm.device)
        for layer, (keys, values) in self._open[id(pack)].own.items():
            if layer not in self._path:
                self._path[layer] = PathLayer.like(keys, values, self._capacity)
            path = self._path[layer]
            path.keys[:, :, place] = keys.detach().index_select(2, chosen)
            path.values[:, :, place] = values.detach().index_select(2, chosen)
            path.key_gradients[:, :, place] = 0
            path.value_gradients[:, :, place] = 0

    def _retract(self, pack: Pack, branch: Branch) -> None:
        """Add the gradients of a branch's keys and values on the path to those of the pack that has the branch."""
        place = slice(pack.depth, pack.depth + len(branch.path))
        chosen = torch.from_numpy(branch.path).to(self.lm.device)
        opened = self._open[id(pack)]
        for layer, own in opened.own.items():
            path = self._path[layer]
            if layer not in opened.gradients:
                key, value = (torch.zeros_like(of, dtype=path.key_gradients.dtype) for of in own)
                opened.gradients[layer] = key, value
            key, value = opened.gradients[layer]
            key.index_add_(2, chosen, path.key_gradients[:, :, place])
            value.index_add_(2, chosen, path.value_gradients[:, :, place])

    def _leave(self, pack: Pack, opened: _Open) -> None:
        """Go backward through a pack, from its loss and from the gradients that the packs below gave to its keys and values."""
        if not opened.held:
            hidden, opened.own = self._forward(pack, keep=True)
            opened.loss = self.visit(hidden, pack.pieces)
        outputs: list[torch.Tensor] = [] if opened.loss is None else [opened.loss]
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        for layer, own in opened.own.items():
            for output, gradient in zip(own, opened.gradients[layer], strict=True):
                if output.requires_grad:
                    outputs.append(output)
                    gradients.append(gradient.to(output.dtype))
        if outputs:  # none if only the output layer is trained
            torch.autograd.backward(outputs, gradients)
        self._held -= len(pack) if opened.held else 0

    def _forward(self, pack: Pack, *, keep: bool) -> tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Return the hidden states (N, H) of a pack and, with `keep`, its keys and values by layer (else an empty dict)."""
        device = self.lm.device
        attending = Attending(kernel_for(device)(pack, device), self._path if pack.depth else {}, keep)
        ids, positions = torch.from_numpy(pack.ids(self.tree)), torch.from_numpy(pack.positions())
        with self.lm.computing():
            hidden = self.lm.hidden_attending(ids.to(device)[None], positions.to(device)[None], attending)
        return hidden[0], attending.own
