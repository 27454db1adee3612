"""Rows computed one by one, each with all its tokens, rows of similar length together.

The invariant: rows are padded on the right only. With causal attention no real token can see the padding behind it, so no
attention mask is needed and positions count from 0; and how rows are grouped changes no token's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightning.batch.sample import Sample
from lightning.engines.rows import name, plan
from lightning.engines.tokens import Ints, States, Tokens, trained_tokens
from lightning.engines.torch.layout import LayoutPart, Visit, failing
from lightning.engines.torch.model import CausalLM


@dataclass(frozen=True, slots=True)
class Linear:
    """A `Layout`. Entries are in the order of the rows; each row is cut to its length."""

    samples: Sequence[Sample]
    lengths: Sequence[int]
    tokens: Tokens
    states: States

    @property
    def least(self) -> int:
        """The longest row: a row is computed whole."""
        return max(self.lengths, default=0)

    @property
    def least_text(self) -> str:
        """What is computed at one time then, for messages."""
        return f"a single row of {self.least} tokens"

    def again(self, samples: Sequence[Sample]) -> Linear:
        """The same rows, of which other numbers are known now."""
        return replace(self, samples=samples, tokens=trained_tokens(samples))

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """One forward and, where `visit` returns a loss, backward pass for each micro-batch."""
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
        width = hidden.shape[1]
        tokens, before = _entries(self.tokens, rows, width)
        states, at = _entries(self.states, rows, width)
        return LayoutPart(hidden.flatten(0, 1), tokens, before - 1, states, at, what)


def _entries(entries: Tokens | States, rows: Sequence[int], width: int) -> tuple[Ints, Ints]:
    """Which entries belong to some rows, and where in a (B * `width`) tensor of these rows they stand."""
    starts, stops = (np.searchsorted(entries.rows, rows, side=side) for side in ("left", "right"))
    chosen = [np.arange(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    places = [entries.columns[own] + place * width for place, own in enumerate(chosen)]
    return np.concatenate(chosen), np.concatenate(places)


def _names(samples: Sequence[Sample]) -> str:
    first, last = name(samples[0]), name(samples[-1])
    return first if first == last else f"{first} to {last}"
