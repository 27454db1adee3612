"""Megatron on a CPU: its layers without Transformer Engine, and its calls to CUDA answered by the CPU.

The invariant: all changes hold only inside `no_cuda`, and where verl's platform is the CPU. verl's and Megatron's code runs as
on GPUs, with packed rows; only attention and norms differ, which Transformer Engine computes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Names of norms: Transformer Engine puts a layer's norms into the linear layers that follow them, and mbridge knows them by
those names."""


class _OnCpu(TorchFunctionMode):
    """Puts tensors meant for a GPU on the CPU, and reports their type as one on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not named:
            return str(function(*args)).replace("torch.", "torch.cuda.", 1)
        device = named.get("device")
        if device is not None and torch.device(device).type == "cuda":
            named["device"] = "cpu"
        return function(*args, **named)


@contextmanager
def no_cuda() -> Iterator[None]:
    """Make Megatron's calls to CUDA use the CPU for the block, in this thread (functions of `torch.cuda`: in this process)."""
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", torch.get_rng_state),
        (random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)),
    ]
    with ExitStack() as stack:
        for module, name, answer in answers:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, answer)
        # Functions that Megatron would compile for a GPU run uncompiled.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_OnCpu())
        yield


class PackedAttention(DotProductAttention):  # type: ignore[misc]  # Megatron has no types
    """Causal attention within each of the packed rows, as Transformer Engine's kernel computes it."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        packed_seq_params: Any,
        **__: object,
    ) -> torch.Tensor:
        """Return the attention's output, (tokens, heads, width) like each input."""
        ends = packed_seq_params.cu_seqlens_q_padded.tolist()
        rows = [self._row(query[start:stop], key[start:stop], value[start:stop]) for start, stop in pairwise(ends)]
        return torch.cat(rows)

    def _row(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = [part.transpose(0, 1) for part in (query, key, value)]
        found = functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return found.transpose(0, 1)


class Norm(nn.RMSNorm):
    """An RMS norm whose input may be divided among the tensor-parallel ranks; Megatron then sums its gradient over them."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark


def without_transformer_engine(bridge: Any) -> None:
    """Make an mbridge bridge build models that need neither Transformer Engine nor a GPU."""
    named = bridge._weight_name_mapping_mcore_to_hf  # noqa: SLF001 — no public way in

    def layers(self: Any, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        block = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = PackedAttention
            for part in (layer.submodules, attention):
                for norm in ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm"):
                    if getattr(part, norm, None) is WrappedTorchNorm:
                        setattr(part, norm, Norm)
        block.layer_norm = Norm
        return block

    def theirs(_: Any, name: str) -> Any:
        for ours, known in _NORMS.items():
            name = name.replace(ours, known)
        return named(name)

    bridge._get_transformer_layer_spec = MethodType(layers, bridge)  # noqa: SLF001
    bridge._weight_name_mapping_mcore_to_hf = MethodType(theirs, bridge)  # noqa: SLF001
