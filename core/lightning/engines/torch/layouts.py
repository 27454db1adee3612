"""The layouts of rows in a pass through the model (row by row, or over their prefix tree), and the passes: reading logprobs or
values without a gradient, and adding up the gradient of a step.

The invariant: every wanted token and every valued state is visited once in either layout. In a tree, a token that rows share is
computed once, but has an entry (so a loss) for each of its rows. All passes compute the same tokens by the same functions, so a
step computes the same logprobs that were read before it.

Rows that are computed row by row are padded on the right only. With causal attention no real token attends to the padding after
it, so no attention mask is needed, positions count from 0, and the grouping of rows does not change a token's result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning.batch.radix import Node, PrefixTree, build_tree
from lightning.batch.sample import Sample
from lightning.engines.logprobs import chunks, token_logprobs
from lightning.engines.rows import (
    Entries,
    Ints,
    Numbers,
    Read,
    Seen,
    States,
    Tally,
    Tokens,
    name,
    plan,
    reordered,
    row_order,
    states_of,
    token_batch,
    trained_tokens,
)
from lightning.engines.step import MadeHead, NonFiniteError, ran_out
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.tree import TreeWalk
from lightning.errors import EngineError
from lightning.losses.protocol import Loss, needs_top_logprobs
from lightning.safe_text import counted


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """The part of a layout that is computed at one time: hidden states, and the tokens and states that are read from them."""

    hidden: torch.Tensor
    """The hidden states, shape (R, H)."""
    tokens: Ints
    """The indices of the part's tokens in the layout."""
    before: Ints
    """For each of these tokens, the index in `hidden` of the state that predicts it."""
    states: Ints
    """The indices of the part's valued states in the layout."""
    at: Ints
    """For each of these states, its index in `hidden`."""
    what: str
    """The rows, for messages."""


Visit = Callable[[LayoutPart], torch.Tensor | None]
"""A function that is called with each part of a walk. If it returns a loss, the walk goes backward from that loss."""


@contextmanager
def failing(doing: str, what: str) -> Iterator[None]:
    """Turn torch's errors inside the block into an `EngineError` that names the pass (`doing`) and the rows (`what`), but a
    lack of memory always into an `OutOfMemoryError`."""
    try:
        yield
    except (torch.OutOfMemoryError, EngineError):
        raise
    except (RuntimeError, IndexError) as error:
        if ran_out(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise EngineError(f"the {doing} failed on {what}: {error}") from error


@dataclass(frozen=True, slots=True)
class Linear:
    """The layout that computes rows one by one, each cut to its length. Tokens and states are in the order of the rows."""

    samples: Sequence[Sample]
    lengths: Sequence[int]
    """The number of tokens of each row that are computed."""
    tokens: Tokens
    """The tokens to predict."""
    states: States
    """The states to value."""

    @property
    def least(self) -> int:
        """The smallest budget in tokens that still makes passes smaller: the longest row, since a row is computed whole."""
        return max(self.lengths, default=0)

    @property
    def least_text(self) -> str:
        """A description of the smallest pass, for messages."""
        return f"a single row of {self.least} tokens"

    def again(self, samples: Sequence[Sample]) -> Linear:
        """Return the layout of the same rows with other numbers of their tokens, such as `reference` or `prepared`."""
        return replace(self, samples=samples, tokens=trained_tokens(samples))

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """Call `visit` with micro-batches of at most `budget` padded tokens, until every token and state was visited once. Each
        has one forward pass and, if `visit` returns a loss, one backward pass. Returns the number of tokens computed."""
        wanted = np.unique(np.concatenate([self.tokens.rows, self.states.rows])).tolist()
        with lm.casts.keeping():
            batches = plan([self.lengths[row] for row in wanted], budget)
            return sum(self._compute([wanted[place] for place in places], lm, visit) for places in batches)

    def _compute(self, rows: Sequence[int], lm: CausalLM, visit: Visit) -> int:
        """Compute one micro-batch, and return its number of padded tokens."""
        ids = self._ids(rows)
        what = f"{counted(len(rows), 'row')} of up to {ids.shape[1]} tokens ({_names([self.samples[row] for row in rows])})"
        with failing("forward pass", what), lm.computing():
            # The last token's hidden state would predict a token behind the row, so it is not computed.
            hidden = lm.hidden(torch.from_numpy(ids[:, :-1]).to(lm.device))
        loss = visit(self._part(rows, hidden, what))
        if loss is not None:
            with failing("backward pass", what):
                loss.backward()  # type: ignore[no-untyped-call]
        return ids.size

    def _ids(self, rows: Sequence[int]) -> Ints:
        """Return the token ids (B, T) of some rows, with zeros behind a row's end."""
        ids = np.zeros((len(rows), max(self.lengths[row] for row in rows)), np.int64)
        for place, row in enumerate(rows):
            ids[place, : self.lengths[row]] = self.samples[row].ids[: self.lengths[row]]
        return ids

    def _part(self, rows: Sequence[int], hidden: torch.Tensor, what: str) -> LayoutPart:
        """Return the part with the hidden states (B, T, H) of some rows and the entries that are read from them."""
        width = hidden.shape[1]
        tokens, before = _row_entries(self.tokens, rows, width)
        states, at = _row_entries(self.states, rows, width)
        return LayoutPart(hidden.flatten(0, 1), tokens, before - 1, states, at, what)


def _row_entries(entries: Tokens | States, rows: Sequence[int], width: int) -> tuple[Ints, Ints]:
    """Return the indices of the entries of some rows, and their places in a flat tensor (B * `width`) of these rows."""
    starts, stops = (np.searchsorted(entries.rows, rows, side=side) for side in ("left", "right"))
    chosen = [np.arange(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    places = [entries.columns[own] + place * width for place, own in enumerate(chosen)]
    return np.concatenate(chosen), np.concatenate(places)


def _names(samples: Sequence[Sample]) -> str:
    first, last = name(samples[0]), name(samples[-1])
    return first if first == last else f"{first} to {last}"


LEAST_TOKENS = 64
"""The smallest budget of a tree after a lack of memory, because passes over fewer tokens need hardly less memory."""

CPU_BYTES = int(1.25 * 2**30)
"""The largest size of a pass's activations on a CPU, in bytes. Larger passes are no faster there (SmolLM2-135M: as fast with
1,024 tokens at one time as with 8,192), and allocating memory is slow."""

RUN_TOKENS = 3
"""The overhead of a run of tokens with attention of its own, in tokens: measured up to 3.8 for runs of 32 tokens, and none for
256, in a model of 4 layers of size 256 on a CPU (`tests/bench/bench_tree.py`)."""


@dataclass(frozen=True, slots=True)
class Forest:
    """The layout that computes rows over their prefix tree. Tokens and states are in the order of their places: the index in
    the tree of the hidden state that each is read from."""

    samples: Sequence[Sample]
    lengths: Sequence[int]
    tree: PrefixTree
    tokens: Tokens
    token_places: Ints
    states: States
    state_places: Ints

    @classmethod
    def of(cls, samples: Sequence[Sample], lengths: Sequence[int], tokens: Tokens, states: States) -> Forest:
        """Return the forest of rows cut to their lengths."""
        tree = build_tree([sample.ids[:length] for sample, length in zip(samples, lengths, strict=True)])
        tokens, token_places = _placed(tree, tokens, tokens.columns - 1)
        states, state_places = _placed(tree, states, states.columns)
        return cls(samples, lengths, tree, tokens, token_places, states, state_places)

    @property
    def pays(self) -> bool:
        """Whether the rows share enough tokens to make the tree faster than single rows, with the overhead of its runs."""
        return sum(self.lengths) > len(self.tree.ids) + len(self.tree.nodes) * RUN_TOKENS

    @property
    def least(self) -> int:
        """The smallest budget in tokens; rows are cut into pieces as small as this."""
        return LEAST_TOKENS

    @property
    def least_text(self) -> str:
        """A description of the smallest pass, for messages."""
        return f"{self.least} tokens at a time, though longer rows are computed in pieces"

    def again(self, samples: Sequence[Sample]) -> Forest:
        """Return the forest of the same rows with other numbers of their tokens, such as `reference` or `prepared`."""
        tokens = trained_tokens(samples)
        tokens, places = _placed(self.tree, tokens, tokens.columns - 1)
        return replace(self, samples=samples, tokens=tokens, token_places=places)

    def by_rows(self) -> Linear:
        """Return the layout of the same tokens, without states, for a model that must be computed row by row."""
        tokens = reordered(self.tokens, row_order(self.tokens))
        return Linear(self.samples, self.lengths, tokens, states_of((), every=True))

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """Call `visit` with every token and state once, in a pass over the nodes that have any at or below them. About `budget`
        tokens are computed at a time. Returns the number of tokens computed."""
        what = f"{len(self.samples)} rows ({name(self.samples[0])} to {name(self.samples[-1])})"

        def visit_runs(hidden: torch.Tensor, runs: Sequence[Node]) -> torch.Tensor | None:
            tokens, before = _run_entries(self.token_places, runs)
            states, at = _run_entries(self.state_places, runs)
            if not len(tokens) and not len(states):
                return None
            return visit(LayoutPart(hidden, tokens, before, states, at, what))

        with failing("pass over the tree", what), lm.casts.keeping():
            return TreeWalk(lm, self.tree, self._needed(), min(budget, _affordable(lm)), visit_runs).run()

    def _needed(self) -> list[bool]:
        """Return, for each node, whether it or a node below it has a token to predict or a state to value."""
        places = np.sort(np.concatenate([self.token_places, self.state_places]))
        edges = np.array([(node.start, node.stop) for node in self.tree.nodes], np.int64).reshape(-1, 2)
        found = np.searchsorted(places, edges)
        needed: list[bool] = (found[:, 1] > found[:, 0]).tolist()
        for index in range(len(needed) - 1, -1, -1):
            parent = self.tree.nodes[index].parent
            if needed[index] and parent >= 0:
                needed[parent] = True
        return needed


Layout = Linear | Forest
"""The way in which rows are computed: row by row, or over their prefix tree."""


def _affordable(lm: CausalLM) -> int:
    """Return the number of tokens whose activations fit in `CPU_BYTES`; no limit on other devices than a CPU. A usual layer in
    float32 is assumed: ten vectors of the model's width and four of its inner width, or with gradient checkpointing two of the
    model's width."""
    if lm.device.type != "cpu":
        return sys.maxsize
    config = lm.model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = 2 * config.hidden_size if lm.model.is_gradient_checkpointing else 10 * config.hidden_size + 4 * inner
    return max(LEAST_TOKENS, CPU_BYTES // int(4 * config.num_hidden_layers * widths))


def _placed(tree: PrefixTree, entries: Entries, columns: Ints) -> tuple[Entries, Ints]:
    """Return entries in the order of their places in the tree, and these places. Each entry is read from the hidden state at
    its column, `columns`, of its row."""
    rows, starts = np.unique(entries.rows, return_index=True)
    parts = np.split(columns, starts[1:]) if len(rows) else []
    found: list[Ints] = [tree.places(row, own) for row, own in zip(rows.tolist(), parts, strict=True)]
    places = np.concatenate([np.zeros(0, np.int64), *found])
    order = np.argsort(places, kind="stable")
    return reordered(entries, order), places[order]


def _run_entries(places: Ints, runs: Sequence[Node]) -> tuple[Ints, Ints]:
    """Return the indices of the entries that are read from the hidden states of some runs, and for each entry the index of its
    state among those of the runs."""
    firsts, lasts = (np.searchsorted(places, [getattr(run, edge) for run in runs]) for edge in ("start", "stop"))
    chosen = [np.arange(first, last) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    before = np.cumsum([0, *(len(run) for run in runs)])[:-1]
    shifts = np.repeat(before - [run.start for run in runs], [len(own) for own in chosen])
    entries = np.concatenate(chosen)
    return entries, places[entries] + shifts


def read_logprobs(layout: Layout, lm: CausalLM, budget: int, top: int = 0) -> Read:
    """Return the logprobs and the entropies of a layout's tokens under a model, and with `top` the logprobs and ids of as many
    most probable tokens, in the order of the rows, without a gradient."""

    def read(part: LayoutPart, *arrays: Numbers) -> None:
        for own, hidden in _chunks(lm, part, part.hidden):
            found, _ = _predicted(lm, hidden, reordered(layout.tokens, own), part.what, top)
            for array, values in zip(arrays, found, strict=True):
                array[own] = values.cpu().numpy()

    precision = _precision(lm)
    kinds: list[tuple[tuple[int, ...], type[np.generic]]] = [((), precision), ((), precision)]
    kinds += [((top,), precision), ((top,), np.int32)] if top else []
    return Read(*_read(layout, lm, budget, layout.tokens, read, kinds))


def read_values(layout: Layout, lm: CausalLM, values: nn.Module, budget: int) -> Numbers:
    """Return the values (M,) that a head's module gives to a layout's states, in the order of the rows."""

    def read(part: LayoutPart, found: Numbers) -> None:
        found[part.states] = values(_picked(part.hidden, part.at)).cpu().numpy()

    numbers: Numbers = _read(layout, lm, budget, layout.states, read, [((), _precision(lm))])[0]
    return numbers


def _precision(lm: CausalLM) -> type[np.floating]:
    return np.float64 if lm.dtype is torch.float64 else np.float32


def _read(
    layout: Layout,
    lm: CausalLM,
    budget: int,
    entries: Tokens | States,
    read: Callable[..., None],
    kinds: Sequence[tuple[tuple[int, ...], type[np.generic]]],
) -> list[npt.NDArray[Any]]:
    """Return numbers for each of a layout's `entries`, in the order of the rows: an array of each of the `kinds`, which are an
    entry's shape and the dtype. `read` puts those of a part into as many arrays in the layout's order."""
    found = [np.zeros((len(entries), *shape), kind) for shape, kind in kinds]
    with lm.evaluating():
        layout.walk(lm, budget, lambda part: read(part, *found))
    order = row_order(entries)
    return [numbers[order] for numbers in found]


@dataclass(slots=True)
class GradientPass:
    """One pass that adds the gradient of every token's and every state's loss to the parameters' gradients."""

    lm: CausalLM
    layout: Layout
    loss: Loss
    head: MadeHead | None
    number: int
    """The number of the step, for messages."""
    tally: Tally = field(default_factory=Tally)

    def run(self, budget: int) -> Tally:
        """Run the pass with about `budget` tokens at a time; return its losses, metrics and the digests of the rows' calls."""
        seen = Seen(self.layout.tokens)

        def visit(part: LayoutPart) -> torch.Tensor | None:
            self.tally.parts += 1
            losses = []
            if len(part.tokens):
                losses.append(self._policy_loss(part, seen))
            if len(part.states):
                losses.append(self._value_loss(part))
            open_ones = [loss for loss in losses if loss.requires_grad]  # none if only the output layer is trained
            return sum(open_ones[1:], open_ones[0]) if open_ones else None

        computed = self.layout.walk(self.lm, budget, visit)
        self.tally.tree = isinstance(self.layout, Forest)
        self.tally.computed(computed, seen.digests(self.layout.samples))
        return self.tally

    def _policy_loss(self, part: LayoutPart, seen: Seen) -> torch.Tensor:
        """Compute the loss of a part's tokens in chunks, and go backward through the output layer after each chunk, so that its
        logits can be freed. Return a stand-in for the loss, whose backward pass gives the hidden states their gradients."""
        gradients, top = [], needs_top_logprobs(self.loss)
        for own, hidden in _chunks(self.lm, part, part.hidden.detach()):
            tokens = reordered(self.layout.tokens, own)
            scores, targets = _predicted(self.lm, hidden.requires_grad_(), tokens, part.what, top)
            batch, sampled = token_batch(tokens, *scores)
            seen.note(own, targets, sampled)
            output = self.loss(batch)
            self._check("loss", output.loss, part)
            self.tally.add(batch, float(output.loss.detach()), output.metrics)
            with failing("backward pass", part.what):
                output.loss.backward()  # type: ignore[no-untyped-call]
            gradients.append(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        known: torch.Tensor = _Known.apply(_picked(part.hidden, part.before), torch.cat(gradients))  # type: ignore[no-untyped-call]
        return known

    def _value_loss(self, part: LayoutPart) -> torch.Tensor:
        """Return the head's loss of a part's states."""
        assert self.head is not None, "rows with value targets are refused without a head"
        states = reordered(self.layout.states, part.states)
        values = self.head.module(_picked(part.hidden, part.at))
        output = self.head.kind.loss(values, states.targets, states.weights)
        self._check("value loss", output.loss, part)
        self.tally.add_states(output.metrics, self.head.kind.metrics)
        return output.loss

    def _check(self, what: str, loss: torch.Tensor, part: LayoutPart) -> None:
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(f"the {what} is {value} at step {self.number} in {part.what}")


class _Known(torch.autograd.Function):
    """A stand-in for a loss whose gradient with respect to `hidden` is known already. Its value is 0."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None


def _chunks(lm: CausalLM, part: LayoutPart, hidden: torch.Tensor) -> Iterator[tuple[Ints, torch.Tensor]]:
    """Yield a part's tokens in chunks: their indices in the layout, and the hidden states (N, H) that predict them."""
    for own in chunks(len(part.tokens), lm.vocab_size, lm.dtype, lm.device):
        yield part.tokens[own], _picked(hidden, part.before[own])


def _predicted(
    lm: CausalLM, hidden: torch.Tensor, tokens: Tokens, what: str, top: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the scores of some tokens (`token_logprobs`) and their ids (N,), from the hidden states (N, H) that predict
    them."""
    targets = torch.from_numpy(tokens.targets).to(lm.device)
    heat = None if tokens.temperatures is None else torch.from_numpy(tokens.temperatures).to(lm.device)
    with failing("output layer", what), lm.computing():
        return token_logprobs(hidden, targets, heat, lm.logits, tokens.mask, top), targets


def _picked(hidden: torch.Tensor, places: Ints) -> torch.Tensor:
    """Return the hidden states at some places, shape (N, H)."""
    return hidden.index_select(0, torch.from_numpy(places).to(hidden.device))
