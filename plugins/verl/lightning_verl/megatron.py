"""The model of a job that Megatron divides by tensors, layers, experts and tokens, as `engine.verl.megatron` says.

The invariant: the gradient is that of the rows, as with FSDP2. verl multiplies the loss by the number of micro-batches, our
losses are multiplied by that of the data-parallel ranks, and Megatron divides by both. Ranks that hold parts of one copy of the
model get the same rows, and only those of the last layers have outputs. A gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.config import LoraConfig
from lightning.engines.logprobs import chunks, restrict
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_verl import api, masks
from lightning_verl.head import Learner
from lightning_verl.megatron_cpu import no_cuda, without_transformer_engine
from lightning_verl.strategy import ReferenceWeights

_WEIGHT, _MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
_OUTPUT_LAYER = "output_layer.weight"
_LEFT_OUT = -1e30
"""A logit of an id that a mask leaves out. Its p is 0; minus infinity would make verl's entropy not a number."""


@api.EngineRegistry.register(
    model_type="language_model", backend="megatron", device=api.get_device_name(), vendor=api.get_vendor()
)
class MegatronEngine(api.megatron_engine()):  # type: ignore[misc]
    """verl's Megatron engine as a `lightning_verl.strategy.Strategy`, without a head."""

    beside: Sequence[tuple[LoraConfig, int]] = ()
    """Empty: Megatron trains no adapters."""

    def __init__(self, **named: Any) -> None:
        with _here():
            super().__init__(**named)

    def initialize(self) -> None:
        """Load the model, as verl does, on the chosen device."""
        with _here():
            super().initialize()

    def forward_backward_batch(self, *arguments: Any, **named: Any) -> Any:
        """Run verl's passes on the chosen device."""
        with _here():
            return super().forward_backward_batch(*arguments, **named)

    def optimizer_zero_grad(self) -> None:
        """Drop the gradient, as verl does."""
        with _here():
            super().optimizer_zero_grad()

    def optimizer_step(self) -> float:
        """Update the weights and return the gradient's norm. Where the norm is not finite no update is made; Megatron itself
        would make it."""
        with _here():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if math.isfinite(norm):
                super().optimizer_step()
        return norm

    def begin(self, max_model_len: int | None) -> None:
        """Do nothing: dropout is off by the settings, Megatron returns logits in float32, and has no weight decay on norms and
        biases."""

    def choose(self, policy: int) -> None:
        """Do nothing: there is one policy."""

    @property
    def trained(self) -> nn.Module:
        """This rank's part of the model."""
        return nn.ModuleList(self.module)

    def first_weights(self, *, moved: bool) -> ReferenceWeights:
        """Return the weights of the model's folder. It is read into the model itself, which then gets its own weights back."""
        with _here(), self.eval_mode():  # eval_mode brings offloaded weights back
            present = ReferenceWeights.of(self.trained)
            if not moved:
                return present
            try:
                read = self.bridge.load_weights if self.vanilla_bridge else self.bridge.load_hf_weights
                read(self.module, self.model_config.local_path)
                return ReferenceWeights.of(self.trained)
            finally:
                present.put(self.trained)

    def whole_weights(self, dtype: torch.dtype, *, wanted: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights under their Hugging Face names, on the CPU, as they are gathered; none where they are not
        `wanted`."""
        seen = set[str]()
        with _here(), self.eval_mode(), torch.no_grad():
            weights, _ = self.get_per_tensor_param()
            for name, tensor in weights:  # all ranks gather it
                if wanted and name not in seen:  # a tied output layer comes again, from the last layers' ranks
                    seen.add(name)
                    yield name, tensor.to(dtype).cpu()

    def save(self, head: Learner | None, folder: Path, steps: int) -> None:
        """Write this rank's shards of weights and moments."""
        del head
        with _here(), self.train_mode(zero_grad_on_exit=False):
            tensors = {}
            for name, parameter, optimizer in self._shards():
                tensors[f"{name}.{_WEIGHT}"] = parameter.detach()
                own = optimizer.state[parameter] if steps else {}
                tensors |= {f"{name}.{moment}": own[moment] for moment in _MOMENTS if moment in own}
            whole = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / _file())
        dist.barrier()  # so that no rank reads the folder while another's file has a temporary name

    def load(self, head: Learner | None, folder: Path, steps: int, head_steps: int) -> None:
        """Read what `save` wrote; as many ranks must read it, with the same parts of the model."""
        del head, head_steps
        tensors = load_file(folder / _file())
        with _here(), self.train_mode(zero_grad_on_exit=True), torch.no_grad():
            for name, parameter, optimizer in self._shards():
                parameter.data.copy_(tensors[f"{name}.{_WEIGHT}"])
                moments = {moment: tensors.get(f"{name}.{moment}") for moment in _MOMENTS}
                own = {name: value.to(parameter.device) for name, value in moments.items() if value is not None}
                if own and isinstance(optimizer, torch.optim.AdamW):  # other optimizers count steps by group
                    own["step"] = torch.tensor(float(steps))
                optimizer.state.pop(parameter, None)
                optimizer.state |= {parameter: own} if own else {}
            for whole in self._optimizers():
                for group in whole.optimizer.param_groups:
                    if not isinstance(whole.optimizer, torch.optim.AdamW):
                        group["step"] = steps
                whole._copy_main_params_to_model_params()  # noqa: SLF001 — as Megatron does after a step
            for chunk in self.module:
                chunk.start_param_sync(force_sync=True)

    def end(self) -> None:
        """Destroy Megatron's process groups."""
        parallel_state.destroy_model_parallel()

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        if self.vanilla_bridge and not self.share_embeddings_and_output_weights:
            # mbridge marks in the class, for all models of the process, that the output layer is the embedding.
            self.bridge._DIRECT_MAPPING = {**self.bridge._DIRECT_MAPPING, _OUTPUT_LAYER: "lm_head.weight"}  # noqa: SLF001
        if api.get_device_name() == "cpu":
            without_transformer_engine(self.bridge)

    def _lm_head_logits_processor(
        self, logits: torch.Tensor, label: torch.Tensor, temperature: torch.Tensor, *, batch: Any, **named: Any
    ) -> Any:
        """Compute logprobs and entropies as verl does, from logits (1, T, V) under the rows' sampling masks."""
        found = masks.given(batch)
        if found is not None:
            logits = self._masked(logits, batch, found)
        return super()._lm_head_logits_processor(logits, label, temperature, batch=batch, **named)

    def _masked(self, logits: torch.Tensor, batch: Any, found: masks.RowMasks) -> torch.Tensor:
        """Return this rank's logits, of its words and its targets, under the masks. Numbers of tokens are packed and cut as
        verl packs and cuts the targets."""
        ids = batch["input_ids"]
        numbers = torch.arange(1, ids.values().numel() + 1, device=ids.device)
        model = self.module[-1]
        places, *_ = api.packed_for_megatron()(
            torch.nested.nested_tensor_from_jagged(numbers, ids.offsets()),
            need_roll=True,
            use_fp8_padding=model.config.fp8 in ("e4m3", "hybrid"),
            pad_to_length_bucket=self.engine_config.pad_to_length_bucket if self.engine_config.pad_to_length else None,
            cp_layout=self._get_context_parallel_layout(model),
        )
        mask = found.of(batch["row"].tolist(), places.reshape(-1).cpu().numpy())
        if mask is None:
            return logits
        shift, words = torch.zeros_like(logits), logits.shape[-1]
        flat, first = shift.view(-1, words), parallel_state.get_tensor_model_parallel_rank() * words
        cut = masks.cut_words(mask, first, words)
        # On zeros, which are added: so the backward pass keeps no indices, and only a chunk of the masks is ever expanded.
        for part in chunks(len(flat), words, flat.dtype, flat.device):
            restrict(flat[part], cut[part], _LEFT_OUT)
        return logits + shift

    def _optimizers(self) -> list[Any]:
        """Return Megatron's optimizers, one for each kind of parameters, without those that have no parameters on this rank."""
        return [own for own in self.optimizer.chained_optimizers if not own.is_stub_optimizer]

    def _shards(self) -> Iterator[tuple[str, torch.Tensor, torch.optim.Optimizer]]:
        """Yield the float32 shards that this rank updates, with a name and their optimizer. The order is the same in every job
        with the same parallel sizes."""
        for number, own in enumerate(self._optimizers()):
            for place, group in enumerate(own.optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    yield f"{number}.{place}.{index}", parameter, own.optimizer


def _here() -> AbstractContextManager[None]:
    return no_cuda() if api.get_device_name() == "cpu" else nullcontext()


def _file() -> str:
    return f"rank-{torch.distributed.get_rank():05d}.safetensors"
