"""From a model's hidden states to logits, and to logprobs and entropies of wanted tokens, in chunks of a few
tokens.

The invariant: a chunk has at most one table of logits in the dtype of losses, and with bfloat16 one more in bfloat16; both
results are differentiable. The table is overwritten in place: logits, then log p, then the gradient. The logits are the model's
own, also where a family caps or scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lightning.errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CHUNK_BYTES = {"cpu": 52 << 20}
"""The largest size of a chunk's tables, by kind of device; with the copies of a block it is 64 MiB. Larger chunks read the
output layer's weights and their gradient less often: with 49,152 words a chunk has 277 tokens in float32, 184 in bfloat16.
Capped logits (Gemma) keep two more tables."""

OTHER_BYTES = 1 << 28
"""The largest size of a chunk's tables on other devices, whose memory is larger and whose kernels need longer rows."""

BLOCK_ELEMENTS = {"cpu": 1 << 20}
"""The numbers of a table that are computed at one time from logits to log p, with up to three copies, by kind of device."""

OTHER_ELEMENTS = 1 << 24
"""The same on other devices: with small blocks a GPU waits for the launch of kernels, not for memory."""

Logits = Callable[[torch.Tensor], torch.Tensor]


def chunks(count: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[slice]:
    """Return the slices that cut `count` tokens into chunks, for a model that computes in `dtype`."""
    exact = torch.promote_types(dtype, torch.float32)
    bytes_each = exact.itemsize + (dtype.itemsize if exact is not dtype else 0)
    size = max(1, CHUNK_BYTES.get(device.type, OTHER_BYTES) // (bytes_each * vocab_size))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def token_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None, logits: Logits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs of `targets` (N,) and entropies (N,), in nats, under softmax(logits(hidden) / temperature).

    `hidden` has shape (N, H); `temperatures` (N,) of None are all 1. Results are float32, or float64 if the logits are.
    """
    scores = logits(hidden)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    result: tuple[torch.Tensor, torch.Tensor] = _LogprobEntropy.apply(scores, targets, temperatures)  # type: ignore[no-untyped-call]
    return result


class _LogprobEntropy(torch.autograd.Function):
    """log p[target] and H = -sum p log p of each row of logits. The table of logits is overwritten by log p, and in the
    backward pass by the gradient.

    With z the logits and t the temperature, d log p[k] / d z_j = (1[j = k] - p_j) / t and d H / d z_j = -p_j (log p_j + H) / t.
    The backward pass computes the entropy's part only if the entropy is used.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entropy = logits.new_empty(len(logits))
        heat = None if temperatures is None else temperatures[:, None].to(logits.dtype)
        least = torch.finfo(logits.dtype).min
        for part in _blocks(logits):
            rows = logits[part]
            log_p = torch.log_softmax(rows if heat is None else rows.div_(heat[part]), dim=-1)
            rows.copy_(log_p)
            # Without the clamp a masked token would give 0 * -inf = NaN; it must give 0.
            entropy[part] = -log_p.exp().mul_(log_p.clamp_min_(least)).sum(-1)
        ctx.save_for_backward(logits, targets, entropy, heat)
        ctx.set_materialize_grads(False)
        return logits.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        table, targets, entropy, heat = ctx.saved_tensors
        by_logprob, by_entropy = grads
        if by_logprob is None and by_entropy is None:
            return None, None, None
        for part in _blocks(table):
            rows = table[part]
            p = torch.exp(rows) if by_entropy is not None else rows.exp_()
            if by_entropy is not None:
                torch.special.entr(p, out=rows)
                rows.addcmul_(p, entropy[part, None], value=-1).mul_(by_entropy[part, None])
                if by_logprob is not None:
                    rows.addcmul_(p, by_logprob[part, None], value=-1)
            elif by_logprob is not None:
                rows.mul_(-by_logprob[part, None])
        if by_logprob is not None:
            table.scatter_add_(-1, targets[:, None], by_logprob[:, None])
        return table if heat is None else table.div_(heat), None, None


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
