"""The model of a job that FSDP2 divides: every weight and its moments in pieces, one for each rank.

The invariant: any number of ranks can read what all ranks save, as safetensors without pickle. Weights and moments are touched
only in one of verl's modes, because outside them offloaded tensors may still be on their way. Of several policies' adapters
those of one are active and trained, and only they have gradients: the others' are put aside, so that no norm has them in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.config import LoraConfig
from lightning.engines import export
from lightning.engines.loading import fix_positions, gradient_mode, unwrapped
from lightning.engines.sameness import refuse_dependence
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_verl import api
from lightning_verl.head import Learner, PolicyEngine
from lightning_verl.scores import TokenScores
from lightning_verl.strategy import ReferenceWeights, whole

_DTYPES = {"bf16": torch.bfloat16}
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_STEP = ".step"


# verl takes a vendor's own engine before the one of all vendors; and it has none for a CPU, where its code runs as it is.
@api.EngineRegistry.register(
    model_type="language_model", backend="fsdp2", device=api.get_device_name(), vendor=api.get_vendor()
)
class Fsdp2Engine(PolicyEngine):
    """verl's FSDP2 engine as a `lightning_verl.strategy.Strategy`, with a head where one is attached."""

    beside: Sequence[tuple[LoraConfig, int]] = ()
    optimizer: torch.optim.Optimizer
    _chosen = 0
    _optimizers: dict[int, torch.optim.Optimizer]
    """The optimizer of each policy that was chosen before, by the policy's number."""
    _gradients: dict[int, list[torch.Tensor | None]]
    """The gradients that were put aside, by the policy's number."""

    def _build_lora_module(self, module: nn.Module) -> Any:
        """Add the first policy's adapters as verl does, and the others' likewise."""
        found = super()._build_lora_module(module)
        first = found.peft_config[_adapter(0)]
        for number, (lora, seed) in enumerate(self.beside, 1):
            modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
            torch.manual_seed(seed)
            found.add_adapter(
                _adapter(number), replace(first, r=lora.rank, lora_alpha=lora.alpha, target_modules=modules)
            )
        return found

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make an optimizer of the weights that are trained now."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer: torch.optim.Optimizer = api.build_optimizer(trained, self.optimizer_config)
        _spare_vectors(optimizer)
        return optimizer

    def choose(self, policy: int) -> None:
        """Make the adapters of a policy the active and trained ones, with their optimizer and their gradient."""
        if policy == self._chosen:
            return
        self.module.reshard()  # after a pass without gradients the root's weights may be whole, and are others
        self._gradients[self._chosen] = [parameter.grad for parameter in self._active()]
        self.optimizer.zero_grad()
        self.module.set_adapter(_adapter(policy))
        for parameter, gradient in zip(self._active(), self._gradients.pop(policy, ()), strict=False):
            parameter.grad = gradient
        if policy not in self._optimizers:
            self._optimizers[policy] = self._build_optimizer(self.module)
        self._chosen, self.optimizer = policy, self._optimizers[policy]

    def _active(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def begin(self, max_model_len: int | None) -> None:
        """Prepare the loaded model for our losses: no dropout, the policy server's positions, packed rows that do not depend on
        each other, logprobs in the place of logits, no weight decay on vectors."""
        self.trained.train = partial(_train, self.trained)  # type: ignore[method-assign]  # verl calls it for each gradient
        folder = Path(self.model_config.local_path)
        context = fix_positions(self.trained, folder, max_model_len)
        base = unwrapped(self.trained)
        self._let_all_learn()  # because FSDP2 decides at its first pass what can ever have a gradient
        with self.eval_mode():
            refuse_dependence(
                self.trained,
                self._packed,
                dtype=_DTYPES.get(self.engine_config.mixed_precision["param_dtype"], torch.float32),
                vocab_size=base.config.get_text_config().vocab_size,
                context=context,
                folder=folder,
            )
            self.scores = TokenScores(self.trained, lambda ids: self._packed(ids, None), folder)
        if self.beside:
            self.module.set_adapter(_adapter(0))
        self._optimizers, self._gradients = {0: self.optimizer}, {}

    def _let_all_learn(self) -> None:
        """Let the adapters of every policy require gradients. FSDP2 takes a unit's dtypes of gradients from the weights that
        require them in its first pass, and has none for a unit in which the first policy has no adapters."""
        learning = []
        for number in range(1, len(self.beside) + 1):
            self.module.set_adapter(_adapter(number))
            learning += self._active()
        if self.beside:
            self.module.set_adapter(_adapter(0))
        for parameter in learning:
            parameter.requires_grad_(True)

    def _packed(self, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Logits (B, T, V) of rows one behind another, as verl computes them."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if positions is None else positions
        output = self.trained(input_ids=ids.reshape(1, -1), position_ids=places.reshape(1, -1), use_cache=False)
        logits: torch.Tensor = output.logits
        return logits.reshape(*ids.shape, -1)

    @property
    def trained(self) -> nn.Module:
        """This rank's part of the model."""
        module: nn.Module = self.module
        return module

    def first_weights(self, *, moved: bool) -> ReferenceWeights:
        """Return the weights of the model's folder; the present ones where they have not `moved`."""
        if not moved:
            with self.eval_mode():
                return ReferenceWeights.of(self.trained)
        found = ReferenceWeights.of(self.read_again())
        _let_go()
        return found

    def whole_weights(self, dtype: torch.dtype, *, wanted: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights under their Hugging Face names, on the CPU, as they are gathered; none where they are not
        `wanted`."""
        with self.eval_mode():
            yield from export.whole_weights(self.trained, dtype, whole, wanted=wanted)

    def save(self, head: Learner | None, folder: Path, steps: int) -> None:
        """Write this rank's part of the training state. A head, which all ranks have whole, is written once."""
        with self.train_mode(zero_grad_on_exit=False):
            tensors = self._tensors(self._moments() if steps else {}, head)
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))

    def load(self, head: Learner | None, folder: Path, steps: int, head_steps: int) -> None:
        """Read a training state that any number of ranks wrote."""
        with self.train_mode(zero_grad_on_exit=True):
            state = self._moments() if steps else {}
            if head is not None:
                head.begin(head_steps)
            load(self._tensors(state, head), storage_reader=HuggingFaceStorageReader(str(folder)))
            if steps:
                state |= {name: torch.tensor(float(steps)) for name in state if name.endswith(_STEP)}
                set_optimizer_state_dict(self.module, self.optimizer, state, options=_OPTIONS)
            else:
                self.optimizer.state.clear()

    def _moments(self) -> dict[str, Any]:
        """Return the optimizer's state by the parameters' names; zeros where no step was taken yet."""
        found: dict[str, Any] = get_optimizer_state_dict(self.module, self.optimizer, options=_OPTIONS)
        return found

    def _tensors(self, state: dict[str, Any], head: Learner | None) -> dict[str, torch.Tensor]:
        """Return the tensors of a training state: trained weights and moments. They share memory with the model and the
        optimizer."""
        trained = self.module.named_parameters()
        weights = {f"weight.{name}": value.data for name, value in trained if value.requires_grad}
        moments = {
            f"optimizer.{name}": value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not name.endswith(_STEP)
        }
        return {**weights, **moments, **(head.tensors() if head else {})}

    def end(self) -> None:
        """Do nothing: FSDP2 leaves nothing behind."""


def _adapter(policy: int) -> str:
    """Return peft's name of the adapters of the policy with this number: verl gives the first one's the name `default`."""
    return f"policy_{policy}" if policy else "default"


def _train(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `nn.Module.train`: the module stays in evaluation mode, without dropout; with `mode` it is set up for
    gradients."""
    nn.Module.train(module, mode=False)
    if mode:
        gradient_mode(module)
    return module


def _spare_vectors(optimizer: torch.optim.Optimizer) -> None:
    """Switch weight decay off for norms and biases, as the torch engine does."""
    (group,) = optimizer.param_groups
    vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
    group["params"] = [parameter for parameter in group["params"] if parameter.ndim >= 2]
    if vectors:
        optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})


def _let_go() -> None:
    """Free the memory of a sharded model that is no longer used: FSDP2 leaves it in reference cycles, which Python seldom
    collects."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
