"""The head on verl's engine: the same as in the torch engine, on the hidden states of a sharded model.

The invariant: the head and its moments are the same on all ranks, bit for bit: all begin with zeros and take the same steps, on
gradients averaged over all ranks as FSDP averages the policy's. The head is in no shard of the model, so that the policy's
gradient norm, weights and files do not contain it.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.engines.loading import unwrapped
from lightning.engines.protocol import Head, OptimizerConfig
from lightning.engines.step import MadeHead
from torch import nn

from lightning_verl import api

Wanted = Literal["none", "also", "only"]
"""Whether a pass computes values of hidden states: no values ("none"), values beside the tokens' logprobs ("also"), or values
without logprobs ("only")."""
WANTED = "values_wanted"


class PolicyEngine(api.FSDPEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """verl's engine for language models, whose passes also compute values if a head was attached and they are `WANTED`."""

    _head: nn.Module | None = None
    _wanted: Wanted = "none"
    _hidden: torch.Tensor | None = None
    _keeps_logits = False

    def attach(self, head: nn.Module) -> None:
        """Compute values with this head from now on."""
        model = unwrapped(self.module)
        getattr(model, model.base_model_prefix).register_forward_hook(self._note)
        self._head, self._keeps_logits = head, "logits_to_keep" in signature(model.forward).parameters

    def read_again(self) -> nn.Module:
        """Load the folder's model again, sharded like the trained one and beside it. All ranks must call it."""
        module: nn.Module = self._build_fsdp_module(self._build_module())
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prepare a micro-batch as verl does. If only values are wanted, the output layer computes just one token, where the
        model permits it."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        self._wanted = api.get_non_tensor_data(micro_batch, WANTED, "none")
        if self._wanted == "only" and self._keeps_logits:
            inputs["logits_to_keep"] = 1
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Return the outputs that verl prepares, and the head's value of each token as `values`, of shape (tokens,) for each
        row. Verl's outputs are left out if only values are wanted, and `values` if none are wanted or no head is attached."""
        hidden, self._hidden = self._hidden, None
        found: dict[str, torch.Tensor] = {}
        if self._wanted != "only":
            found = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._head is not None and hidden is not None:
            # Ranks that share a sequence exchange values, not hidden states. All tokens get values, though
            # only the loss knows which few count: 8 bytes for each of a token's hidden units, beside 12 for each word.
            values = self._gather_and_unpad_packed(self._head(hidden.squeeze(0)), output_args["pad_size"])
            found["values"] = torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())
        return found

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """A forward hook of the model without its output layer: keep the hidden states if values are wanted."""
        if self._wanted != "none":
            self._hidden = output.last_hidden_state


class Learner:
    """A head and its optimizer, on one rank. All ranks call the same methods."""

    def __init__(self, model: nn.Module, head: Head, optimizer: OptimizerConfig) -> None:
        module = head.module(unwrapped(model), dtype=torch.float32, device=api.get_device_id())
        self.made = MadeHead(head, module)
        self._lr, self._largest = optimizer.lr, optimizer.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=head.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=0.0,
            fused=True,
        )

    def discard(self) -> None:
        """Drop the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Average the gradient over the ranks and clip it. Returns the norm before clipping, the same on all ranks."""
        parameters = [*self.made.module.parameters()]
        # A rank whose rows have no valued state has no gradient.
        grads = [torch.zeros_like(own) if own.grad is None else own.grad for own in parameters]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [own.numel() for own in parameters])
        for own, grad in zip(parameters, parts, strict=True):
            own.grad = grad.view_as(own)
        return float(nn.utils.clip_grad_norm_(parameters, self._largest))

    def update(self, lr: float) -> None:
        """Update the head with the clipped gradient, in a step at the policy's rate `lr`."""
        (group,) = self._optimizer.param_groups
        group["lr"] = lr * self.made.kind.lr / self._lr
        self._optimizer.step()
        self.discard()

    def begin(self, steps: int) -> None:
        """Reset the optimizer to the state after this many steps, with moments of zero, so that the numbers of `tensors` can be
        read."""
        self.discard()
        self._optimizer.state.clear()
        for own in self.made.module.parameters() if steps else ():
            taken = torch.tensor(float(steps), device=own.device)
            moments = {name: torch.zeros_like(own) for name in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[own] = {"step": taken, **moments}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the head in a training state, by their names in the state. They share memory with the head."""
        found: dict[str, torch.Tensor] = {}
        for name, own in self.made.parameters().items():
            found[f"weight.{name}"] = own.data.view(-1)
            moments = self._optimizer.state.get(own, {})
            found |= {f"optimizer.state.{name}.{key}": moments[key].view(-1) for key in moments if key != "step"}
        return found
