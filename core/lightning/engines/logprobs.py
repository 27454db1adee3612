"""From a model's hidden states to logits, and to logprobs of wanted and of most probable tokens and entropies, in chunks of a
few tokens.

The invariant: a chunk has at most one table of logits, in the dtype that the model computes in; the results are
differentiable and are computed in the dtype of losses, a block of the table at a time. The backward pass overwrites the table
with the gradient. The logits are the model's own, also where a family caps or scales them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning.batch.masks import SamplingMask
from lightning.errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CHUNK_BYTES = {"cpu": 52 << 20}
"""The largest size of a chunk's table, by kind of device; with the copies of a block it is 64 MiB. Larger chunks read the
output layer's weights and their gradient less often: with 49,152 words a chunk has 277 tokens in float32, 554 in bfloat16.
Capped logits (Gemma) keep two more tables."""

OTHER_BYTES = 1 << 28
"""The largest size of a chunk's table on other devices, whose memory is larger and whose kernels need longer rows."""

BLOCK_ELEMENTS = {"cpu": 1 << 20}
"""The numbers of a table that are computed at one time from logits to log p, with up to three copies, by kind of device."""

OTHER_ELEMENTS = 1 << 24
"""The same on other devices: with small blocks a GPU waits for the launch of kernels, not for memory."""

Logits = Callable[[torch.Tensor], torch.Tensor]


def chunks(count: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[slice]:
    """Return the slices that cut `count` tokens into chunks, for a model that computes in `dtype`."""
    size = max(1, CHUNK_BYTES.get(device.type, OTHER_BYTES) // (dtype.itemsize * vocab_size))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    logits: Logits,
    mask: SamplingMask | None = None,
    top: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Return logprobs of `targets` (N,) and entropies (N,), in nats, under softmax(logits(hidden) / temperature), or with a
    `mask` under softmax((logits(hidden) + bias) / temperature) over each token's kept ids. With `top` also return, in
    descending order, the logprobs (N, top) of the most probable tokens and their ids. A token without a chance has the lowest
    finite number and the id -1.

    `hidden` has shape (N, H); `temperatures` (N,) of None are all 1. Results are float32, or float64 if the logits are.
    """
    found: tuple[torch.Tensor, ...] = _LogprobEntropy.apply(logits(hidden), targets, temperatures, mask, top)  # type: ignore[no-untyped-call]
    return found if top else found[:2]


class _LogprobEntropy(torch.autograd.Function):
    """log p[target], H = -sum p log p, and the largest log p of each row of logits. The backward pass overwrites the table of
    logits with their gradient.

    With z the logits and t the temperature, d log p[k] / d z_j = (1[j = k] - p_j) / t and d H / d z_j = -p_j (log p_j + H) / t.
    The backward pass computes only the parts of the results that are used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        mask: SamplingMask | None = None,
        top: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        kind = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropy = (logits.new_empty(len(logits), dtype=kind) for _ in range(2))
        top_logprobs = logits.new_empty(len(logits), top, dtype=kind)
        top_ids = torch.empty_like(top_logprobs, dtype=torch.int64)
        heat = None if temperatures is None else temperatures[:, None].to(kind)
        least = torch.finfo(kind).min
        for part in _blocks(logits):
            log_p = _log_p(logits, heat, mask, part)
            logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            if top:
                torch.topk(log_p, top, out=(top_logprobs[part], top_ids[part]))
            # Without the clamp a masked token would give 0 * -inf = NaN; it must give 0.
            entropy[part] = -log_p.exp().mul_(log_p.clamp_min_(least)).sum(-1)
            del log_p  # or it would live beside the next block's
        top_ids.masked_fill_(top_logprobs.isneginf(), -1)
        top_logprobs.clamp_min_(least)
        ctx.save_for_backward(logits, targets, entropy, heat, top_ids)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top_ids)
        ctx.mask = mask
        return logprobs, entropy, top_logprobs, top_ids

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        table, targets, entropy, heat, top_ids = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None, None, None
        for part in _blocks(table):
            by = (None if grad is None else grad[part] for grad in grads[:3])
            rows = _by_logits(_log_p(table, heat, ctx.mask, part), targets[part], entropy[part], top_ids[part], *by)
            table[part] = rows if heat is None else rows.div_(heat[part])
            del rows  # or it would live beside the next block's
        return table, None, None, None, None


def _log_p(table: torch.Tensor, heat: torch.Tensor | None, mask: SamplingMask | None, part: slice) -> torch.Tensor:
    """Return log p (B, V) of a block of logits, at least in float32; `heat` are the temperatures (N, 1)."""
    rows = table[part].to(torch.promote_types(table.dtype, torch.float32), copy=mask is not None)
    if mask is not None:
        restrict(rows, mask[part])
    return torch.log_softmax(rows if heat is None else rows / heat[part], dim=-1)


def restrict(rows: torch.Tensor, mask: SamplingMask, least: float = -math.inf) -> None:
    """Add the biases of a mask to its tokens' logits (B, V), and set those of the ids that it leaves out to `least`."""

    def place(tokens: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(tokens).to(rows.device), torch.from_numpy(ids.astype(np.int64)).to(rows.device)

    biased, ids, values = mask.bias.expanded()
    if values is not None and len(ids):
        added = torch.from_numpy(values).to(rows.device, rows.dtype)
        rows.index_put_(place(biased, ids), added, accumulate=True)
    tokens, ids, _ = mask.ids.expanded()
    is_left_out = mask.is_left_out[tokens]
    left_out, kept = (place(tokens[each], ids[each]) for each in (is_left_out, ~is_left_out))
    logits = rows[kept]
    rows[torch.from_numpy(np.flatnonzero(~mask.is_left_out)).to(rows.device)] = least
    rows[left_out] = least
    rows[kept] = logits


def _by_logits(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    top_ids: torch.Tensor,
    by_logprob: torch.Tensor | None,
    by_entropy: torch.Tensor | None,
    by_top: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient (B, V) with respect to the logits over the temperature, written over `log_p`, from the gradients
    with respect to the targets' logprobs (B,), to the entropies (B,) and to the logprobs (B, k) of the tokens `top_ids`."""
    by_each = by_logprob  # the sum of a row's gradients with respect to logprobs
    if by_top is not None:
        # A token without a chance stays without one, whatever a loss does with its number.
        by_top = by_top.masked_fill(top_ids < 0, 0.0)
        by_each = by_top.sum(-1) if by_each is None else by_each + by_top.sum(-1)
    p = torch.exp(log_p) if by_entropy is not None else log_p.exp_()
    if by_entropy is not None:
        torch.special.entr(p, out=log_p)
        log_p.addcmul_(p, entropy[:, None], value=-1).mul_(by_entropy[:, None])
        if by_each is not None:
            log_p.addcmul_(p, by_each[:, None], value=-1)
    elif by_each is not None:
        log_p.mul_(-by_each[:, None])
    if by_logprob is not None:
        log_p.scatter_add_(-1, targets[:, None], by_logprob[:, None])
    if by_top is not None:
        log_p.scatter_add_(-1, top_ids.clamp(min=0), by_top)
    return log_p


def _blocks(table: torch.Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS.get(table.device.type, OTHER_ELEMENTS) // table.shape[1])
    return (slice(start, start + size) for start in range(0, len(table), size))


def trunk(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that computes hidden states; of a model with vision, its text decoder."""
    if model.config.get_text_config() is model.config:
        named = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"  # Llama 4's text model
        return cast("nn.Module", getattr(model, named))
    return cast("nn.Module", model.get_decoder())


def same_output(
    tried: Iterable[tuple[Logits, torch.Tensor]], expected: torch.Tensor, model: nn.Module, folder: Path
) -> Logits:
    """Return the first function whose logits are the model's own, `expected`. Raises `EngineError` naming the architecture
    if there is none."""
    for logits, found in tried:
        coarse = torch.bfloat16 in (found.dtype, expected.dtype) or torch.is_autocast_enabled(expected.device.type)
        tolerance = 1e-2 if coarse else 1e-4
        if torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
            return logits
    raise EngineError(
        f"the architecture {type(model).__name__} in {folder} computes its logits in a way this engine does not know: "
        "its output layer is neither plain, nor scaled, nor capped"
    )


def outputs_of(layer: Logits, config: PretrainedConfig) -> Iterator[Logits]:
    """Yield the candidates for a model's function from hidden states to logits, by its output layer and its configuration:
    capped, scaled, divided, and last the plain output layer."""
    # Gemma, RecurrentGemma, xLSTM
    caps = (
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    )
    if cap := next(filter(None, caps), None):
        yield lambda hidden: torch.tanh(layer(hidden) / cap) * cap
    scale = getattr(config, "logit_scale", None)  # Cohere
    if scale:
        yield lambda hidden: layer(hidden) * scale
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor:
        yield lambda hidden: layer(hidden) / divisor
    yield lambda hidden: layer(hidden)
