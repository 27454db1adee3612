"""The worker extension of a vLLM that has the adapters of several policies.

The invariant: after `lightning_load` each adapter is exactly that of the file, or the answer says what went wrong; the base
model is never changed. A matrix that vLLM would leave out is refused by its name. All adapters of a file are read before the
first one is replaced.

vLLM gives the adapters of `--lora-modules` the ids 1, 2, ... in that order, which is the order of the policies' names. An
adapter is replaced as vLLM replaces one that is loaded again in place (`LRUCacheWorkerLoRAManager.add_adapter`). Tested with
0.31 on a CPU; with tensor or pipeline parallelism, where vLLM cuts the matrices itself, and on a GPU it was not.

On a CPU two faults of vLLM 0.31 are corrected. Its function for adapters takes the last adapter for rows without one
(`bgmv_shrink` with the index -1), so that untrained policies would answer with a trained one's adapter beside others' calls.
And where two calls are computed together its adapters for the output layer, which are zero here, end the engine when prompt
logprobs are asked for. The function here also needs less: vLLM's copies an adapter for each token, which for 2048 tokens takes
nine times as long as the layer itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lightning.policy_server.model_folder import LORA_A, LORA_B, POLICIES
from lightning.policy_server.worker import State, WorkerExtension

SHOWN = 3
"""The most matrices that a message names."""


class PolicyWorker(WorkerExtension):
    """The core's extension for a vLLM with one adapter for each trained policy."""

    def _lightning_replace(self, paths: Sequence[str]) -> None:
        """Replace all adapters by those of one file (`model_folder.POLICIES`)."""
        (path,) = paths
        replace_adapters(self.model_runner.lora_manager, path)  # type: ignore[attr-defined]

    def _lightning_known(self) -> State:
        """Return the state of this worker. The first call corrects vLLM's adapters on a CPU."""
        first = getattr(self, "_lightning_state", None) is None
        state = super()._lightning_known()
        if first:
            manager = self.model_runner.lora_manager  # type: ignore[attr-defined]
            for wrapper in manager._adapter_manager.punica_wrapper_mapping.values():  # noqa: SLF001 — vLLM's, as below
                compute_by_adapter(wrapper)
            if (found := manager.list_adapters()) != set(range(1, manager.lora_config.max_loras + 1)):
                raise RuntimeError(
                    f"vLLM has the adapters {sorted(found)} instead of one for each policy: take arguments for LoRA out of "
                    "policy_server.args"
                )
        return state


def replace_adapters(manager: Any, path: str) -> None:
    """Replace all adapters by those of a file, in vLLM's worker; `manager` is the runner's `lora_manager`.

    Raises `RuntimeError` if the file has other policies than vLLM was started for, or a matrix to which vLLM adds no adapter.
    """
    import torch
    from safetensors import safe_open

    models = manager._adapter_manager  # noqa: SLF001 — vLLM has no other way to an adapter that is not in a folder
    with safe_open(path, framework="pt", device="cpu") as file:
        policies = json.loads(file.metadata()[POLICIES])
        if len(policies) != models.lora_slots:
            raise RuntimeError(
                f"{path} has the policies {', '.join(sorted(policies))}, and vLLM was started for {models.lora_slots}"
            )
        made = [
            _adapter(manager, file, number, name, policies[name]["scaling"])
            for number, name in enumerate(sorted(policies), 1)
        ]
    for adapter in made:
        models.remove_adapter(adapter.id)
        models.add_adapter(adapter)
        models.activate_adapter(adapter.id)
    if models.device.type != "cpu":
        torch.accelerator.synchronize()


def _adapter(manager: Any, file: Any, number: int, policy: str, scaling: dict[str, float]) -> Any:
    """Return vLLM's model of a policy's adapter, with the id `number`, from an open file."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    models, rank = manager._adapter_manager, 1  # noqa: SLF001 — as above
    tensors: dict[str, Any] = {}
    for matrix, scale in scaling.items():
        down, up = (file.get_tensor(f"{policy}|{matrix}{part}") for part in (LORA_A, LORA_B))
        module = f"base_model.model.{matrix.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up * scale}
        rank = max(rank, len(down))
    about = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])  # the scale is in the matrices already
    about.validate_legal(manager.lora_config)
    mapper = getattr(models.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        number,
        tensors,
        about,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        skip_prefixes=getattr(models.model, "lora_skip_prefixes", None),
    )
    if left_out := sorted(adapter.loras.keys() - _adapted(models, adapter.loras)):
        more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in left_out}))
        raise RuntimeError(
            f"vLLM adds no adapter to {', '.join(left_out[:SHOWN])}{more}, and the policy {policy!r} has one there: name the "
            f"modules of adapters without {kinds} (policies.{policy}.lora.target_modules, or engine.lora.target_modules)"
        )
    return adapter


def _adapted(models: Any, wanted: Sequence[str]) -> set[str]:
    """Return the modules to which vLLM adds adapters: linear layers, alone or as parts of a fused layer. With pipeline
    parallelism, also those of `wanted` that another worker has."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.model_executor.models.utils import PPMissingLayer

    linear = {name for name, module in models.modules.items() if isinstance(module, BaseLinearLayerWithLoRA)}
    parts = {part for name in linear for part in models.packed_modules.get(name, ())}
    missing = tuple(f"{name}." for name, module in models.model.named_modules() if isinstance(module, PPMissingLayer))
    return linear | parts | {name for name in wanted if name.startswith(missing)}


def compute_by_adapter(wrapper: Any) -> None:
    """Have vLLM's adapters on a CPU computed correctly: those of linear layers for the rows of each adapter, and none for the
    embedding and the output layer, which no policy has. A `wrapper` for another device is left as it is."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    if isinstance(wrapper, PunicaWrapperCPU):
        replaced: dict[str, Callable[..., None]] = {
            "add_lora_linear": _linear_of(wrapper),
            "add_lora_logits": _nothing,
            "add_lora_embedding": _nothing,
        }
        vars(wrapper).update(replaced)


def _nothing(*args: object, **named: object) -> None:
    """Add no adapter."""


def _linear_of(wrapper: Any) -> Callable[..., None]:
    def add_lora_linear(
        y: Any, x: Any, downs: Sequence[Any], ups: Sequence[Any], scale: float, widths: Sequence[int], **_: object
    ) -> None:
        """Add x A B of each row's adapter to `y`, shape (rows, sum(widths)), for a layer of one or several parts. `x` has shape
        (rows, in), each of `downs` (adapters, 1, rank, in) and each of `ups` (adapters, 1, width, rank)."""
        if wrapper.no_lora:
            return
        starts, lengths, adapters = (part.tolist() for part in wrapper.prefill_metadata[:3])
        y, x, left = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), 0
        for down, up, width in zip(downs, ups, widths, strict=True):
            for start, length, adapter in zip(starts, lengths, adapters, strict=True):
                if adapter >= 0:  # -1: the rows have none
                    rows = slice(start, start + length)
                    inner = x[rows].float() @ down[adapter, 0].float().T
                    y[rows, left : left + width] += (inner @ up[adapter, 0].float().T) * scale
            left += width

    return add_lora_linear
