"""Logprobs, entropies and most probable tokens from a sharded model in the place of its logits, a chunk of tokens at a time.

The invariant: values and gradients are those of the whole table of logits in float32, of which no rank ever has more than one
chunk (`lightning.engines.logprobs`). The backward pass computes a chunk's logits again, and adds up the gradients of the
output layer in float32. All is computed inside the output layer's forward and backward pass, because only there FSDP2 has the
layer's weights whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.batch import SamplingMask
from lightning.engines.loading import unwrapped
from lightning.engines.logprobs import Logits, chunks, outputs_of, same_output, token_logprobs, trunk
from torch import nn

Part = TypeVar("Part", torch.Tensor, SamplingMask)
Wanted = Literal["none", "also", "only"]
"""Whether a pass computes values of hidden states: no values ("none"), values beside the tokens' logprobs ("also"), or values
without logprobs ("only")."""


SCORES = ("log_probs", "entropy", "top_logprobs", "top_ids")
"""The names of the results of `token_logprobs` in a pass's output; the last two only where the loss wants them."""


class TokenScores:
    """Replaces a model's forward pass. It takes rows one behind another, T tokens in all, and returns `log_probs` and
    `entropy` (T,) of the `targets` (T,) at their `temperatures` (T,), of None at 1, under their `mask` (T), of None over all
    ids; `top_logprobs` and `top_ids` (T, `top`) of the most probable tokens, if any are wanted; and the states `hidden` (T, H)
    if they are wanted, or only these."""

    targets: torch.Tensor
    temperatures: torch.Tensor | None = None
    mask: SamplingMask | None = None
    wanted: Wanted = "none"
    top: int = 0

    def __init__(self, model: nn.Module, logits: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> None:
        """`logits(ids)` runs the model as it is on ids (1, T), and returns its logits (1, T, V); all ranks must call it.
        Raises `EngineError` for a model whose logits are computed in an unknown way."""
        base = unwrapped(model)
        self._trunk, self._layer = trunk(base), base.get_output_embeddings()
        self._words = int(base.config.get_text_config().vocab_size)
        self._logits = _find(self._trunk, self._layer, base, logits, folder)
        self._layer.forward = self._score
        base.forward = self._forward

    def _forward(self, **given: Any) -> dict[str, torch.Tensor]:
        inputs = {name: value for name, value in given.items() if value is not None}
        hidden = self._trunk(**inputs).last_hidden_state.squeeze(0)
        found = {} if self.wanted == "none" else {"hidden": hidden}
        if self.wanted != "only":
            found |= zip(SCORES, self._layer(hidden), strict=False)
        return found

    def _score(self, hidden: torch.Tensor) -> Any:
        """The output layer's forward pass."""
        trained = [parameter for parameter in self._layer.parameters() if parameter.requires_grad]
        parts = list(chunks(len(hidden), self._words, hidden.dtype, hidden.device))
        given = self.targets, self.temperatures, self.mask, self.top
        return _Chunked.apply(hidden, *given, self._logits, parts, *trained)  # type: ignore[no-untyped-call]


class _Chunked(torch.autograd.Function):
    """`token_logprobs` of chunks of tokens; the backward pass computes each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        mask: SamplingMask | None,
        top: int,
        logits: Logits,
        parts: Sequence[slice],
        *trained: nn.Parameter,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(hidden, targets, temperatures)
        ctx.mask, ctx.top, ctx.logits, ctx.parts, ctx.trained = mask, top, logits, parts, trained
        kind = hidden.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.set_materialize_grads(False)
        found = [
            token_logprobs(hidden[own], targets[own], _of(temperatures, own), logits, _of(mask, own), top)
            for own in parts
        ]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, targets, temperatures = ctx.saved_tensors
        whole, sums = torch.empty_like(hidden), [torch.zeros_like(own, dtype=torch.float32) for own in ctx.trained]
        cast = nullcontext() if ctx.autocast is None else torch.autocast(hidden.device.type, ctx.autocast)
        for own in ctx.parts:
            with torch.enable_grad(), cast:
                states = hidden[own].detach().requires_grad_()
                given = states, targets[own], _of(temperatures, own)
                found = token_logprobs(*given, ctx.logits, _of(ctx.mask, own), ctx.top)
            pairs = [(each, grad[own]) for each, grad in zip(found, grads, strict=True) if grad is not None]
            whole[own], *added = torch.autograd.grad(
                [each for each, _ in pairs], [states, *ctx.trained], [grad for _, grad in pairs]
            )
            for total in sums:
                total += added.pop(
                    0
                )  # popped, or it would live beside the next chunk's, which is as large as the layer
        kept = [total.to(own.dtype) for total, own in zip(sums, ctx.trained, strict=True)]
        return whole, None, None, None, None, None, None, *kept


def _of(whole: Part | None, own: slice) -> Part | None:
    return None if whole is None else whole[own]


def _find(
    body: nn.Module, layer: nn.Module, base: Any, logits: Callable[[torch.Tensor], torch.Tensor], folder: Path
) -> Logits:
    """Return the model's function from hidden states to logits. The candidates are tried in the output layer's own pass."""
    plain: Logits = layer.forward
    states, tried = list[torch.Tensor](), list[torch.Tensor]()
    candidates = list(outputs_of(plain, base.config.get_text_config()))
    device: Any = layer.weight.device

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    def probe(hidden: torch.Tensor) -> torch.Tensor:
        tried.extend(candidate(states[-1]) for candidate in candidates)
        return plain(hidden)

    hook, layer.forward = body.register_forward_hook(note), probe
    try:
        with torch.no_grad():
            expected = logits(torch.arange(4, device=device)[None])
    finally:
        hook.remove()
        layer.forward = plain
    return same_output(zip(candidates, tried, strict=True), expected, base, folder)
