"""The critic on verl's engine: both engines' value head, on the hidden states of a model that is sharded.

The invariant: the head and its moments are the same on all ranks, bit for bit: each begins with the same zeros and takes the
same steps, on gradients that are averaged over all ranks as FSDP averages the policy's. So it is in no shard of the model:
the policy's gradient norm, its weights and its files know nothing of it.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.engines.critic import Trunk, ValueHead
from lightning.engines.loading import unwrapped
from lightning.engines.protocol import OptimizerConfig
from torch import nn

from lightning_verl import api

Wanted = Literal["none", "also", "only"]
"""Whether a pass gives the values of hidden states: beside the logprobs of tokens, or without them."""
WANTED = "values_wanted"


class PolicyEngine(api.FSDPEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """verl's engine for language models, whose passes also give values where a critic was attached and they are `WANTED`."""

    _critic: ValueHead | None = None
    _wanted: Wanted = "none"
    _hidden: torch.Tensor | None = None
    _keeps_logits = False

    def attach(self, critic: ValueHead) -> None:
        """Value hidden states with this critic from now on."""
        model = unwrapped(self.module)
        getattr(model, model.base_model_prefix).register_forward_hook(self._note)
        self._critic, self._keeps_logits = critic, "logits_to_keep" in signature(model.forward).parameters

    def read_again(self) -> nn.Module:
        """The model of the folder, sharded as the trained one and beside it. All ranks must call it."""
        module: nn.Module = self._build_fsdp_module(self._build_module())
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """See verl. Where values alone are wanted the output layer is spared but for one token."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        self._wanted = api.get_non_tensor_data(micro_batch, WANTED, "none")
        if self._wanted == "only" and self._keeps_logits:
            inputs["logits_to_keep"] = 1
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """See verl. `values` are those of each token's hidden state, (tokens,) for each row."""
        hidden, self._hidden = self._hidden, None
        found: dict[str, torch.Tensor] = {}
        if self._wanted != "only":
            found = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._critic is not None and hidden is not None:
            # Values, not hidden states, are what ranks that share a sequence send one another. All tokens are valued, though
            # the loss alone knows which few count: 8 bytes for each of a token's hidden units, beside 12 for each word.
            values = self._gather_and_unpad_packed(self._critic(hidden.squeeze(0)), output_args["pad_size"])
            found["values"] = torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())
        return found

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """A forward hook of the model without its output layer."""
        if self._wanted != "none":
            self._hidden = output.last_hidden_state


class Learner:
    """A critic and its optimizer, on one rank. All ranks call the same methods."""

    def __init__(self, model: nn.Module, trunk: Trunk, optimizer: OptimizerConfig) -> None:
        self.critic = ValueHead(unwrapped(model), trunk, dtype=torch.float32, device=api.get_device_id())
        self._largest = optimizer.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            [*self.critic.parameters().values()],
            lr=optimizer.critic_lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=0.0,
            fused=True,
        )

    def discard(self) -> None:
        """Forget the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Average the gradient over the ranks and clip it; returns its norm as it was, the same on all of them."""
        parameters = [*self.critic.parameters().values()]
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
        """Take a step with the clipped gradient."""
        (group,) = self._optimizer.param_groups
        group["lr"] = lr
        self._optimizer.step()
        self.discard()

    def begin(self, steps: int) -> None:
        """Be as after so many steps but for the numbers of `tensors`, which are then read."""
        self.discard()
        self._optimizer.state.clear()
        for own in self.critic.parameters().values() if steps else ():
            taken = torch.tensor(float(steps), device=own.device)
            moments = {name: torch.zeros_like(own) for name in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[own] = {"step": taken, **moments}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a training state has of it, by the names there; they share memory with what is learned."""
        found: dict[str, torch.Tensor] = {}
        for name, own in self.critic.parameters().items():
            found[f"weight.{name}"] = own.data.view(-1)
            moments = self._optimizer.state.get(own, {})
            found |= {f"optimizer.state.{name}.{key}": moments[key].view(-1) for key in moments if key != "step"}
        return found
