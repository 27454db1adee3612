"""How rows go through the model, one by one or over their prefix tree; and the passes: reading logprobs or values without a
gradient, and adding up the gradient of a step.

The invariant: every wanted token and every valued state is visited once, however the rows are computed; a token that rows share
is computed once in a tree, and has an entry (so a loss) for each of its rows. All passes see the same tokens through the same
functions, so what is read before a step is what the step computes again.

Rows that are computed one by one are padded on the right only. With causal attention no real token can see the padding behind
it, so no attention mask is needed and positions count from 0; and how rows are grouped changes no token's result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lightning.batch.radix import Node, PrefixTree, build_tree
from lightning.batch.sample import Sample
from lightning.engines.critic import ValueHead
from lightning.engines.microbatch import Seen, Tally, state_loss, token_batch
from lightning.engines.rows import (
    Entries,
    Ints,
    Numbers,
    States,
    Tokens,
    name,
    plan,
    reordered,
    row_order,
    states_of,
    trained_tokens,
)
from lightning.engines.step import NonFiniteError, ran_out
from lightning.engines.torch.logprobs import chunks, token_logprobs
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.tree import TreeWalk
from lightning.errors import EngineError
from lightning.losses.protocol import Loss


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """What is computed at one time: hidden states, and the entries that are read from them."""

    hidden: torch.Tensor
    """(R, H)."""
    tokens: Ints
    """Which tokens of the layout."""
    before: Ints
    """The row of `hidden` that predicts each."""
    states: Ints
    """Which states of the layout."""
    at: Ints
    """The row of `hidden` that is each."""
    what: str
    """The rows, for messages."""


Visit = Callable[[LayoutPart], torch.Tensor | None]
"""What is done with a part; the loss that it returns is differentiated at once."""


@contextmanager
def failing(doing: str, what: str) -> Iterator[None]:
    """Whatever torch raises in a pass becomes an `EngineError`; a shortage of memory always an `OutOfMemoryError`."""
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
    """Rows one by one. Entries are in the order of the rows; each row is cut to its length."""

    samples: Sequence[Sample]
    lengths: Sequence[int]
    """How many tokens of each row are computed."""
    tokens: Tokens
    """What is predicted."""
    states: States
    """What is valued."""

    @property
    def least(self) -> int:
        """The budget below which passes do not get smaller: the longest row, since a row is computed whole."""
        return max(self.lengths, default=0)

    @property
    def least_text(self) -> str:
        """What is computed at one time then, for messages."""
        return f"a single row of {self.least} tokens"

    def again(self, samples: Sequence[Sample]) -> Linear:
        """The layout of rows with the same ids and spans, of which other numbers are known now."""
        return replace(self, samples=samples, tokens=trained_tokens(samples))

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """Visit every entry once, at most `budget` padded tokens at a time; returns how many tokens were computed. One forward
        and, where `visit` returns a loss, backward pass for each micro-batch."""
        wanted = np.unique(np.concatenate([self.tokens.rows, self.states.rows])).tolist()
        computed = 0
        for places in plan([self.lengths[row] for row in wanted], budget):
            rows = [wanted[place] for place in places]
            ids = self._ids(rows)
            computed += ids.size
            what = f"{len(rows)} rows of up to {ids.shape[1]} tokens ({_names([self.samples[row] for row in rows])})"
            with failing("forward pass", what), lm.computing():
                # What the last token says of the next one is not asked.
                hidden = lm.hidden(torch.from_numpy(ids[:, :-1]).to(lm.device))
            loss = visit(self._part(rows, hidden, what))
            if loss is not None:
                with failing("backward pass", what):
                    loss.backward()  # type: ignore[no-untyped-call]
        return computed

    def _ids(self, rows: Sequence[int]) -> Ints:
        """(B, T) token ids; zeros behind a row's end."""
        ids = np.zeros((len(rows), max(self.lengths[row] for row in rows)), np.int64)
        for place, row in enumerate(rows):
            ids[place, : self.lengths[row]] = self.samples[row].ids[: self.lengths[row]]
        return ids

    def _part(self, rows: Sequence[int], hidden: torch.Tensor, what: str) -> LayoutPart:
        """What is read from the hidden states (B, T, H) of some rows."""
        width = hidden.shape[1]
        tokens, before = _row_entries(self.tokens, rows, width)
        states, at = _row_entries(self.states, rows, width)
        return LayoutPart(hidden.flatten(0, 1), tokens, before - 1, states, at, what)


def _row_entries(entries: Tokens | States, rows: Sequence[int], width: int) -> tuple[Ints, Ints]:
    """Which entries belong to some rows, and where in a (B * `width`) tensor of these rows they stand."""
    starts, stops = (np.searchsorted(entries.rows, rows, side=side) for side in ("left", "right"))
    chosen = [np.arange(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    places = [entries.columns[own] + place * width for place, own in enumerate(chosen)]
    return np.concatenate(chosen), np.concatenate(places)


def _names(samples: Sequence[Sample]) -> str:
    first, last = name(samples[0]), name(samples[-1])
    return first if first == last else f"{first} to {last}"


LEAST_TOKENS = 64
"""The smallest budget that a shortage of memory leads to: passes over fewer tokens need hardly less."""

CPU_BYTES = int(1.25 * 2**30)
"""What the activations of a pass may take on a CPU. More makes it no faster there (SmolLM2-135M: as fast with 1,024 tokens at
one time as with 8,192), and fresh memory is slow."""

RUN_TOKENS = 3
"""What a run of tokens with attention of its own costs besides its tokens, in tokens: up to 3.8 where runs have 32 tokens,
nothing where they have 256, in a model of 4 layers of size 256 on a CPU (`tests/bench/bench_tree.py`)."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Rows over their prefix tree. Entries are in the order of their places: where in the tree the hidden state stands that
    each needs."""

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

    def by_rows(self) -> Linear:
        """The same tokens for a model that is computed row by row, without states."""
        tokens = reordered(self.tokens, row_order(self.tokens))
        return Linear(self.samples, self.lengths, tokens, states_of((), every=True))

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """One pass over the nodes that have entries at or below them."""
        what = f"{len(self.samples)} rows ({name(self.samples[0])} to {name(self.samples[-1])})"

        def visit_runs(hidden: torch.Tensor, runs: Sequence[Node]) -> torch.Tensor | None:
            tokens, before = _run_entries(self.token_places, runs)
            states, at = _run_entries(self.state_places, runs)
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


Layout = Linear | Forest
"""How rows go through the model."""


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


def _run_entries(places: Ints, runs: Sequence[Node]) -> tuple[Ints, Ints]:
    """Which entries need a hidden state of some runs of tokens, and where it stands among the states of these."""
    firsts, lasts = (np.searchsorted(places, [getattr(run, edge) for run in runs]) for edge in ("start", "stop"))
    chosen = [np.arange(first, last) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    before = np.cumsum([0, *(len(run) for run in runs)])[:-1]
    shifts = np.repeat(before - [run.start for run in runs], [len(own) for own in chosen])
    entries = np.concatenate(chosen)
    return entries, places[entries] + shifts


def read_logprobs(layout: Layout, lm: CausalLM, budget: int) -> Numbers:
    """Logprobs (N,) of a layout's tokens under any model of its family, in the order of the rows, without a gradient."""
    found = np.full(len(layout.tokens), np.nan, _precision(lm))

    def visit(part: LayoutPart) -> None:
        for own, hidden in _chunks(lm, part, part.hidden):
            logprobs, *_ = _predicted(lm, hidden, reordered(layout.tokens, own), part.what)
            found[own] = logprobs.cpu().numpy()

    with lm.evaluating():
        layout.walk(lm, budget, visit)
    ordered: Numbers = found[row_order(layout.tokens)]
    return ordered


def read_values(layout: Layout, lm: CausalLM, critic: ValueHead, budget: int) -> Numbers:
    """The critic's values (M,) of a layout's states, in the order of the rows."""
    found = np.full(len(layout.states), np.nan, _precision(lm))

    def visit(part: LayoutPart) -> None:
        found[part.states] = critic(_picked(part.hidden, part.at)).cpu().numpy()

    with lm.evaluating():
        layout.walk(lm, budget, visit)
    ordered: Numbers = found[row_order(layout.states)]
    return ordered


@dataclass(slots=True)
class GradientPass:
    """Adds the gradient of every token's and every state's loss to the parameters."""

    lm: CausalLM
    layout: Layout
    loss: Loss
    critic: ValueHead | None
    number: int
    """The step's, for messages."""
    tally: Tally = field(default_factory=Tally)

    def run(self, budget: int) -> Tally:
        """What the losses were, and what their tensors held of each call of the rows."""
        seen = Seen(self.layout.tokens)

        def visit(part: LayoutPart) -> torch.Tensor | None:
            self.tally.parts += 1
            losses = []
            if len(part.tokens):
                losses.append(self._policy_loss(part, seen))
            if len(part.states):
                losses.append(self._value_loss(part))
            open_ones = [loss for loss in losses if loss.requires_grad]  # none where the output layer alone is trained
            return sum(open_ones[1:], open_ones[0]) if open_ones else None

        computed = self.layout.walk(self.lm, budget, visit)
        self.tally.tree = isinstance(self.layout, Forest)
        self.tally.computed(computed, seen.digests(self.layout.samples))
        return self.tally

    def _policy_loss(self, part: LayoutPart, seen: Seen) -> torch.Tensor:
        """Each chunk goes backward through the output layer at once, so that its logits can go; what this says about the
        hidden states is what is left to differentiate."""
        gradients = []
        for own, hidden in _chunks(self.lm, part, part.hidden.detach()):
            tokens = reordered(self.layout.tokens, own)
            logprobs, entropy, targets = _predicted(self.lm, hidden.requires_grad_(), tokens, part.what)
            batch, sampled = token_batch(tokens, logprobs, entropy)
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
        """The critic's loss of a part's states."""
        assert self.critic is not None, "rows with value targets are refused without a critic"
        states = reordered(self.layout.states, part.states)
        values = self.critic(_picked(part.hidden, part.at))
        output = state_loss(states, values)
        self._check("value loss", output.loss, part)
        self.tally.add_values(output.metrics)
        return output.loss

    def _check(self, what: str, loss: torch.Tensor, part: LayoutPart) -> None:
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(f"the {what} is {value} at step {self.number} in {part.what}")


class _Known(torch.autograd.Function):
    """Stands for a loss whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None


def _chunks(lm: CausalLM, part: LayoutPart, hidden: torch.Tensor) -> Iterator[tuple[Ints, torch.Tensor]]:
    """Some tokens of a part at a time, and (N, H) the hidden states that predict them."""
    for own in chunks(len(part.tokens), lm.vocab_size, lm.dtype, lm.device):
        yield part.tokens[own], _picked(hidden, part.before[own])


def _predicted(
    lm: CausalLM, hidden: torch.Tensor, tokens: Tokens, what: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs and entropies (N,) of some tokens, and these."""
    targets = torch.from_numpy(tokens.targets).to(lm.device)
    heat = None if tokens.temperatures is None else torch.from_numpy(tokens.temperatures).to(lm.device)
    with failing("output layer", what), lm.computing():
        logprobs, entropy = token_logprobs(hidden, targets, heat, lm.logits)
    return logprobs, entropy, targets


def _picked(hidden: torch.Tensor, places: Ints) -> torch.Tensor:
    """(N, H): the hidden states at some places."""
    return hidden.index_select(0, torch.from_numpy(places).to(hidden.device))


def _precision(lm: CausalLM) -> type[np.floating]:
    return np.float64 if lm.dtype is torch.float64 else np.float32
