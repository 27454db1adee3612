"""Passes over a layout: reading logprobs or values without a gradient, and adding up the gradient of a step.

The invariant: all passes see the same tokens through the same functions, so what is read before a step is what the step
computes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning.engines.critic import ValueHead
from lightning.engines.failures import NonFiniteError
from lightning.engines.microbatch import Seen, Tally, state_loss, token_batch
from lightning.engines.rows import Ints, Numbers, Tokens, reordered, row_order
from lightning.engines.torch.layouts import Forest, Layout, LayoutPart, failing
from lightning.engines.torch.logprobs import chunks, token_logprobs
from lightning.engines.torch.model import CausalLM
from lightning.losses.protocol import Loss


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
