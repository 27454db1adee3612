"""The model of a job that Megatron cuts: by tensors, layers, experts and tokens, as `engine.verl.megatron` says.

The invariant: the gradient is that of the rows, as FSDP2's is. verl multiplies the loss by the number of micro-batches and our
losses by that of the data-parallel ranks, and Megatron divides by both; ranks that hold parts of one copy of the model get
the same rows, of which those of the last layers alone have outputs; and a gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_verl import api
from lightning_verl.critic import Learner
from lightning_verl.megatron_cpu import no_cuda, without_transformer_engine
from lightning_verl.strategy import ReferenceWeights

_WEIGHT, _MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
_OUTPUT_LAYER = "output_layer.weight"


@api.EngineRegistry.register(
    model_type="language_model", backend="megatron", device=api.get_device_name(), vendor=api.get_vendor()
)
class MegatronEngine(api.megatron_engine()):  # type: ignore[misc]
    """Implements `lightning_verl.strategy.Strategy`, without a critic."""

    def __init__(self, **named: Any) -> None:
        with _here():
            super().__init__(**named)

    def initialize(self) -> None:
        """See verl."""
        with _here():
            super().initialize()

    def forward_backward_batch(self, *arguments: Any, **named: Any) -> Any:
        """See verl."""
        with _here():
            return super().forward_backward_batch(*arguments, **named)

    def optimizer_zero_grad(self) -> None:
        """See verl."""
        with _here():
            super().optimizer_zero_grad()

    def optimizer_step(self) -> float:
        """See verl. Where the norm, which is returned, is not finite no step is taken: Megatron itself would take it."""
        with _here():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if math.isfinite(norm):
                super().optimizer_step()
        return norm

    def begin(self, max_model_len: int | None) -> None:
        """See `Strategy.begin`. Nothing is left to do: dropout is off in the settings, Megatron returns logits in float32 and
        spares norms and biases the weight decay."""

    @property
    def trained(self) -> nn.Module:
        """See `Strategy.trained`."""
        return nn.ModuleList(self.module)

    def first_weights(self, *, moved: bool) -> ReferenceWeights:
        """See `Strategy.first_weights`. The folder is read into the model itself, which then gets its weights back."""
        with _here(), self.eval_mode():  # weights that are kept elsewhere are brought
            present = ReferenceWeights.of(self.trained)
            if not moved:
                return present
            try:
                read = self.bridge.load_weights if self.vanilla_bridge else self.bridge.load_hf_weights
                read(self.module, self.model_config.local_path)
                return ReferenceWeights.of(self.trained)
            finally:
                present.put(self.trained)

    def whole_weights(self, dtype: torch.dtype, *, wanted: bool) -> dict[str, torch.Tensor]:
        """See `Strategy.whole_weights`."""
        found: dict[str, torch.Tensor] = {}
        with _here(), self.eval_mode(), torch.no_grad():
            weights, _ = self.get_per_tensor_param()
            for name, tensor in weights:  # all ranks gather it
                if wanted and name not in found:  # a tied output layer comes again, from the last layers' ranks
                    found[name] = tensor.to(dtype).cpu().clone().contiguous()
        return found

    def save(self, critic: Learner | None, folder: Path, steps: int) -> None:
        """See `Strategy.save`."""
        del critic
        with _here(), self.train_mode(zero_grad_on_exit=False):
            tensors = {}
            for name, parameter, optimizer in self._shards():
                tensors[f"{name}.{_WEIGHT}"] = parameter.detach()
                own = optimizer.state[parameter] if steps else {}
                tensors |= {f"{name}.{moment}": own[moment] for moment in _MOMENTS if moment in own}
            whole = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / _file())
        dist.barrier()  # so that nobody looks at the folder while another's file has a name for the time being

    def load(self, critic: Learner | None, folder: Path, steps: int, critic_steps: int) -> None:
        """See `Strategy.load`; by as many ranks as wrote it, with the same parts of the model."""
        del critic, critic_steps
        tensors = load_file(folder / _file())
        with _here(), self.train_mode(zero_grad_on_exit=True), torch.no_grad():
            for name, parameter, optimizer in self._shards():
                parameter.data.copy_(tensors[f"{name}.{_WEIGHT}"])
                moments = {moment: tensors.get(f"{name}.{moment}") for moment in _MOMENTS}
                own = {name: value.to(parameter.device) for name, value in moments.items() if value is not None}
                if own and isinstance(optimizer, torch.optim.AdamW):  # others count for a group
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
        """See `Strategy.end`."""
        parallel_state.destroy_model_parallel()

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        if self.vanilla_bridge and not self.share_embeddings_and_output_weights:
            # mbridge notes in the class that a model's output layer is its embedding, for all models of the process.
            self.bridge._DIRECT_MAPPING = {**self.bridge._DIRECT_MAPPING, _OUTPUT_LAYER: "lm_head.weight"}  # noqa: SLF001
        if api.get_device_name() == "cpu":
            without_transformer_engine(self.bridge)

    def _optimizers(self) -> list[Any]:
        """Megatron's, one for each kind of parameters; without those that have none on this rank."""
        return [own for own in self.optimizer.chained_optimizers if not own.is_stub_optimizer]

    def _shards(self) -> Iterator[tuple[str, torch.Tensor, torch.optim.Optimizer]]:
        """What this rank updates, in float32, which is a part of what it computes with; in an order that is the same in each
        job that is cut alike."""
        for number, own in enumerate(self._optimizers()):
            for place, group in enumerate(own.optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    yield f"{number}.{place}.{index}", parameter, own.optimizer


def _here() -> AbstractContextManager[None]:
    return no_cuda() if api.get_device_name() == "cpu" else nullcontext()


def _file() -> str:
    return f"rank-{torch.distributed.get_rank():05d}.safetensors"
