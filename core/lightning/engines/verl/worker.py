"""One rank of a training job: verl's worker, which computes our losses on rows and writes our files.

The invariant: whatever goes wrong with data is returned, not raised, so that no rank waits for one that stopped; what is
raised (no memory, a dead peer) ends the whole group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning.batch.sample import FloatArray, Sample
from lightning.engines.export import whole_weights, write_file, write_folder
from lightning.engines.torch.model import silence_dropout
from lightning.engines.verl import api
from lightning.engines.verl.passes import LossPass, Report
from lightning.engines.verl.reference import ReferenceWeights
from lightning.engines.verl.shards import load_shards, save_shards
from lightning.losses.protocol import Loss

if api.get_device_name() == "cpu":
    # verl registers its engines for accelerators only; they run on a CPU as they are.
    api.EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(api.FSDPEngineWithLMHead)


class PolicyWorker(api.TinkerTrainingWorker):  # type: ignore[misc]  # verl has no types
    """Holds this rank's shard of the model and of its optimizer. `seed` is that of new adapters, the same on all ranks."""

    def __init__(self, config: Any, *, seed: int, threads: int) -> None:
        if api.get_device_name() == "cpu":
            if threads:
                torch.set_num_threads(threads)
            if not dist.is_initialized():  # verl would ask for gloo twice, which torch refuses
                dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        torch.manual_seed(seed)
        super().__init__(config)
        self.engine.initialize()
        silence_dropout(self._module)
        # verl takes the softmax in the dtype of the logits: in bfloat16 a logprob would be off by up to 0.04.
        self._module.register_forward_hook(_in_float32)
        _spare_vectors(self.engine.optimizer)
        # Before a training state is loaded: the reference is the model of the folder, also in a run that is resumed.
        self._reference = ReferenceWeights.of(self._module)

    @property
    def _module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.engine.module
        return module

    def place(self) -> tuple[int, bool]:
        """The rank's place among those that share out rows, and whether it is the one of its place that answers."""
        return int(self.engine.get_data_parallel_rank()), bool(self.engine.is_mp_src_rank_with_outputs())

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int, budget: int) -> Report:
        """Compute the gradient of this rank's rows; what was there before is forgotten."""
        self.discard()
        found = LossPass(samples, loss, step)
        data = self._data(samples, budget, calculate_entropy=True)
        with self.engine.train_mode(zero_grad_on_exit=False):
            self.engine.forward_backward_batch(data, loss_function=found, forward_only=False)
        return found.finished()

    def discard(self) -> None:
        """Forget the gradient."""
        with self.engine.train_mode(zero_grad_on_exit=False):
            self.engine.optimizer_zero_grad()

    def update(self, lr: float) -> float:
        """Clip the gradient and take a step; returns its norm. Where that is not finite nothing is changed."""
        with self.engine.train_mode(zero_grad_on_exit=True):
            for group in self.engine.optimizer.param_groups:
                group["lr"] = lr
            return float(self.engine.optimizer_step())

    def logprobs(self, samples: Sequence[Sample], budget: int, *, reference: bool) -> list[FloatArray]:
        """Logprobs (T,) of this rank's rows, by the model or by the one that training began with; index 0 is NaN."""
        data = self._data(samples, budget, calculate_entropy=False)
        with self.engine.eval_mode(), torch.no_grad():
            if not reference:
                return _rows(self._infer(data))
            with self._reference.in_place(self._module):
                return _rows(self._infer(data))

    def write_weights(self, file: Path, dtype: str) -> None:
        """Write the full weights; every rank takes part, the first one writes."""
        weights = whole_weights(self._module, getattr(torch, dtype), _whole, wanted=self.rank == 0)
        if self.rank == 0:
            write_file(weights, file)

    def write_model(self, source: Path, folder: Path, dtype: str) -> None:
        """Write a model folder; every rank takes part, the first one writes."""
        weights = whole_weights(self._module, getattr(torch, dtype), _whole, wanted=self.rank == 0)
        if self.rank == 0:
            write_folder(source, weights, dtype, folder)

    def save(self, folder: Path, steps: int) -> tuple[str, list[str]]:
        """Write this rank's shards of weights and moments, after so many steps, into a folder that exists; returns this
        machine's name and the files that it sees there."""
        save_shards(self.engine, folder, steps)
        return socket.gethostname(), sorted(file.name for file in folder.iterdir())

    def load(self, folder: Path, steps: int) -> None:
        """Read weights and moments, written by however many ranks; `steps` were taken."""
        load_shards(self.engine, folder, steps)

    def _infer(self, data: Any) -> torch.Tensor:
        output = self.engine.forward_backward_batch(data, loss_function=None, forward_only=True)
        found: torch.Tensor = output["model_output"]["log_probs"]
        return found

    def _data(self, samples: Sequence[Sample], budget: int, *, calculate_entropy: bool) -> Any:
        """Rows in verl's form: packed ids, with a number for each row by which its tokens are found."""
        lengths = [len(sample) for sample in samples]
        ids = [torch.from_numpy(sample.ids.astype(np.int64)) for sample in samples]
        heat = [sample.temperature for sample in samples]
        data = api.TensorDict(
            {
                "input_ids": _jagged(ids),
                "position_ids": _jagged([torch.arange(length) for length in lengths]),
                "loss_mask": _jagged(
                    [torch.from_numpy((sample.weights != 0).astype(np.float32)) for sample in samples]
                ),
                "row": torch.arange(len(samples)),
            },
            batch_size=[len(samples)],
        )
        own = {} if all(value == 1.0 for value in heat) else {"temperature": torch.tensor(heat)}
        for name, value in own.items():
            data[name] = value
        api.assign_non_tensor(
            data,
            **({} if own else {"temperature": 1.0}),
            calculate_entropy=calculate_entropy,
            use_remove_padding=True,
            use_dynamic_bsz=True,
            use_fused_kernels=False,
            max_token_len_per_gpu=budget,
            micro_batch_size_per_gpu=None,
            return_model_output=not calculate_entropy,
        )
        return data


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _in_float32(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
    """A forward hook."""
    if getattr(output, "logits", None) is not None:
        output.logits = output.logits.float()
    return output


def _spare_vectors(optimizer: torch.optim.Optimizer) -> None:
    """Weight decay is for matrices; norms and biases do without, as in the torch engine."""
    (group,) = optimizer.param_groups
    vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
    group["params"] = [parameter for parameter in group["params"] if parameter.ndim >= 2]
    if vectors:
        optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _rows(logprobs: torch.Tensor) -> list[FloatArray]:
    """verl's entry t of a row is what token t + 1 was predicted with."""
    blank = np.array([np.nan], np.float32)
    return [np.append(blank, own[:-1].float().cpu().numpy()) for own in logprobs.unbind()]
