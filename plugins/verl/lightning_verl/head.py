"""The head on verl's engine: the same as in the torch engine, on the hidden states of a sharded model.

The invariant: the head and its moments are the same on all ranks, bit for bit: all begin with zeros and take the same steps, on
gradients averaged over all ranks as FSDP averages the policy's. The head is in no shard of the model, so that the policy's
gradient norm, weights and files do not contain it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.batch import SamplingMask
from lightning.engines.loading import unwrapped
from lightning.engines.protocol import Head, OptimizerConfig
from lightning.engines.step import MadeHead
from torch import nn

from lightning_verl import api, masks
from lightning_verl.scores import TokenScores

WANTED, TOP = "values_wanted", "top_wanted"


class PolicyEngine(api.FSDPEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """verl's engine for language models, whose passes compute logprobs and entropies without a table of logits, and values if a
    head was attached and they are `WANTED`."""

    _head: nn.Module | None = None
    scores: TokenScores
    """Set once the model is prepared."""

    def attach(self, head: nn.Module) -> None:
        """Compute values with this head from now on."""
        self._head = head

    def read_again(self) -> nn.Module:
        """Load the folder's model again, sharded like the trained one and beside it. All ranks must call it."""
        module: nn.Module = self._build_fsdp_module(self._build_module())
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prepare a micro-batch as verl does, and tell the model which tokens follow, and among which ids they were drawn."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        self.scores.targets = arguments["input_ids_rmpad_rolled"]
        self.scores.temperatures = None if arguments["temperature_is_one"] else arguments["temperature_rmpad"]
        self.scores.mask = self._mask(micro_batch, len(self.scores.targets))
        self.scores.wanted = api.get_non_tensor_data(micro_batch, WANTED, "none")
        self.scores.top = api.get_non_tensor_data(micro_batch, TOP, 0)
        return inputs, arguments

    def _mask(self, micro_batch: Any, count: int) -> SamplingMask | None:
        """Return the masks of the `count` targets that this rank computes, of all that the ranks with these rows share."""
        found = masks.given(micro_batch)
        if found is None:
            return None
        total = micro_batch["input_ids"].values().numel()
        first = api.get_ulysses_sequence_parallel_rank() * count if self.use_ulysses_sp else 0
        places = np.arange(first + 2, first + count + 2)  # the target is the next token, as verl rolls them
        places[places > total] = 0
        return found.of(micro_batch["row"].tolist(), places)

    def prepare_model_outputs(
        self, output: dict[str, torch.Tensor], output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Return the scores of tokens by their names (`SCORES`), unless only values are wanted, and the head's value of each
        token as `values`, if they are wanted and a head is attached. Each has shape (tokens,) for each row, and those of the k
        most probable tokens (tokens, k)."""
        hidden = output.pop("hidden", None)
        if self._head is not None and hidden is not None:
            # Ranks that share a sequence exchange values, not hidden states. All tokens get values, though
            # only the loss knows which few count: 8 bytes for each of a token's hidden units.
            output["values"] = self._head(hidden)
        offsets = micro_batch["input_ids"].offsets()
        whole = {name: self._gather_and_unpad_packed(own, output_args["pad_size"]) for name, own in output.items()}
        return {name: torch.nested.nested_tensor_from_jagged(own, offsets) for name, own in whole.items()}


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
