"""One rank of a training job: verl's worker, which computes our losses on rows and writes our files.

The invariant: errors of data are returned, not raised, so that no rank waits for one that stopped. What is raised (no memory, a
lost peer) ends the whole group.
"""

from __future__ import annotations

import math
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.batch import FloatArray, Sample
from lightning.config import LoraConfig
from lightning.engines.export import write_adapters, write_file, write_folder
from lightning.engines.protocol import Opening
from lightning.errors import LightningError
from lightning.losses.protocol import Loss, needs_top_logprobs
from lightning_attach.transfer import LocalSender

from lightning_verl import api
from lightning_verl.head import TOP, WANTED, Learner
from lightning_verl.masks import MASKS, RowMasks
from lightning_verl.passes import LossPass, Report
from lightning_verl.scores import Wanted
from lightning_verl.strategy import ReferenceWeights, Strategy, whole

MODULES = {"fsdp2": "fsdp", "megatron": "megatron"}
"""The module that divides a model, by strategy; Megatron is imported only where it is used."""


@dataclass(slots=True)
class _Policy:
    """One of the policies of a model: its head, its weights at the start of training (None: not kept), and whether they have
    changed since."""

    learner: Learner | None
    reference: ReferenceWeights | None
    moved: bool = False


class PolicyWorker(api.TinkerTrainingWorker):  # type: ignore[misc]  # verl has no types
    """Holds this rank's shard of the model and of its optimizers, one for each policy. Calls are for the policy of the last
    `choose`, at first for the first one.

    `learners` has for each policy the seed of its new adapters, the same on all ranks, and its head with the head's settings;
    those of the model are in `config`, with the first policy's adapters. `beside` are the adapters of the other policies.
    `max_model_len` is the policy server's (`lightning.engines.loading`). `teacher` is the configuration of another reference
    model; None: there is none."""

    def __init__(
        self,
        config: Any,
        *,
        learners: Sequence[Opening],
        threads: int,
        beside: Sequence[LoraConfig] = (),
        max_model_len: int | None = None,
        teacher: Any | None = None,
    ) -> None:
        if api.get_device_name() == "cpu":
            if threads:
                torch.set_num_threads(threads)
            if not dist.is_initialized():  # verl would ask for gloo twice, which torch refuses
                dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        torch.manual_seed(learners[0].seed)
        # Importing the module registers its engine with verl.
        import_module(f"lightning_verl.{MODULES[config.engine_config.strategy]}")
        super().__init__(config)
        self._part: Strategy = self.engine
        self._part.beside = [(lora, own.seed) for lora, own in zip(beside, learners[1:], strict=True)]
        self.engine.initialize()
        self._part.begin(max_model_len)
        self._sender = LocalSender()
        self._policies: list[_Policy] = []
        for number, own in enumerate(learners):
            self._part.choose(number)
            # Adapters are small; whole weights are kept when a loss wants them, see `_first_weights`.
            first = self._part.first_weights(moved=False) if config.model_config.lora_rank else None
            learner = None if own.head is None else Learner(self._part.trained, own.head, own.optimizer)
            self._policies.append(_Policy(learner, first))
        self.choose(0)
        self._teacher = None if teacher is None else _read_beside(teacher, max_model_len)

    def choose(self, policy: int) -> None:
        """Compute for the policy with this number from now on."""
        self._part.choose(policy)
        self._own = self._policies[policy]
        if self._own.learner is not None:
            self.engine.attach(self._own.learner.made.module)

    def place(self) -> tuple[int, bool]:
        """Return the rank's index among the data-parallel ranks, and whether it is the rank that answers for that index."""
        return int(self.engine.get_data_parallel_rank()), bool(self.engine.is_mp_src_rank_with_outputs())

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int, added: bool, budget: int) -> Report:
        """Compute the gradient of this rank's rows. With `added` it is added to the present gradient, else it replaces it.
        `budget` is the tokens of a micro-batch."""
        if not added:
            self.discard()
        head = None if self._own.learner is None else self._own.learner.made.kind
        found = LossPass(samples, loss, head, step)
        valued = any(span.value_weight for sample in samples for span in sample.spans)
        values: Wanted = "also" if valued else "none"
        data = self._data(samples, budget, calculate_entropy=True, values=values, top=needs_top_logprobs(loss))
        with self.engine.train_mode(zero_grad_on_exit=False):
            self.engine.forward_backward_batch(data, loss_function=found, forward_only=False)
        return found.finished()

    def discard(self) -> None:
        """Drop the gradient."""
        if self._own.learner is not None:
            self._own.learner.discard()
        with self.engine.train_mode(zero_grad_on_exit=False):
            self.engine.optimizer_zero_grad()

    def update(self, lr: float | None, head_lr: float | None) -> dict[str, float]:
        """Clip the policy's and the head's gradient, each by its own norm, and update them in a step at the policy's rates `lr`
        and `head_lr`; None: no update. Returns the norms before clipping. Where a norm is not finite nothing is changed."""
        norms = {"grad_norm": 0.0}
        if self._own.learner is not None:
            norms[f"{self._own.learner.made.kind.name}_grad_norm"] = (
                0.0 if head_lr is None else self._own.learner.clip()
            )
        with self.engine.train_mode(zero_grad_on_exit=True):
            if lr is not None and all(map(math.isfinite, norms.values())):
                for group in self.engine.optimizer.param_groups:
                    group["lr"] = lr
                norms["grad_norm"] = float(self.engine.optimizer_step())
                self._own.moved = True
        if self._own.learner is not None and head_lr is not None and all(map(math.isfinite, norms.values())):
            self._own.learner.update(head_lr)
        return norms

    def logprobs(self, samples: Sequence[Sample], budget: int, *, reference: bool) -> list[FloatArray]:
        """Return the logprobs (T,) of each of this rank's rows, by the model or by the reference, which is the teacher or the
        model at the start of training. Index 0 is NaN."""
        data = self._data(samples, budget, calculate_entropy=False, values="none")
        engine = self.engine
        weights: AbstractContextManager[None] = nullcontext()
        if reference and self._teacher is not None:
            engine = self._teacher
        elif reference:
            weights = self._first_weights().in_place(self._part.trained)
        with engine.eval_mode(), torch.no_grad(), weights:
            found = _infer(engine, data, "log_probs")
        return [] if found is None else _rows(found)

    def values(self, samples: Sequence[Sample], budget: int) -> list[FloatArray]:
        """Return the head's values of the states before the calls, (spans,) for each of this rank's rows."""
        data = self._data(samples, budget, calculate_entropy=False, values="only")
        with self.engine.eval_mode(), torch.no_grad():
            found = _infer(self.engine, data, "values")
        assert found is not None, "all ranks of FSDP2 have the last layer, and others no head"
        columns = [[span.start - 1 for span in sample.spans] for sample in samples]
        return [own[at].cpu().numpy() for own, at in zip(found.unbind(), columns, strict=True)]

    def write(self, source: Path, target: Path, dtype: str, *, model: bool) -> None:
        """Write the full weights as a file, or with `model` as a model folder. Every rank takes part, and the first one
        writes, each tensor as it is gathered."""
        weights = self._part.whole_weights(getattr(torch, dtype), wanted=self.rank == 0)
        try:
            if self.rank == 0:
                (write_folder if model else write_file)(source, weights, getattr(torch, dtype), target)
        finally:
            deque(weights, maxlen=0)  # other ranks gather all of them, also where the first one's disk is full

    def write_adapters(self, source: Path, target: Path, dtype: str) -> bool:
        """Write the adapters alone as a file; return False, and write nothing, if `source` stores a matrix in another form.
        Every rank takes part, and the first one writes."""
        kind, first = getattr(torch, dtype), self.rank == 0
        with self.engine.eval_mode():
            return write_adapters(source, self._part.trained, kind, target, whole, wanted=first) is not None

    def sending(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, str]:
        """Call a method of the first rank's sender; return its answer, and its error as text, so that a failed transfer ends no
        worker. Other ranks do nothing."""
        if self.rank:
            return None, ""
        try:
            return getattr(self._sender, method)(*arguments), ""
        except LightningError as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001 — an exception would end all workers
            return None, f"{type(error).__name__}: {error}"

    def save(self, folder: Path, steps: int) -> tuple[str, list[str]]:
        """Write this rank's shards of weights and moments into an existing folder, after this many steps. Returns this
        machine's name and the names of the files that it sees there."""
        self._part.save(self._own.learner, folder, steps)
        return socket.gethostname(), sorted(file.name for file in folder.iterdir())

    def load(self, folder: Path, steps: int, head_steps: int) -> None:
        """Read weights and moments that any number of ranks wrote, after `steps` of the policy and `head_steps` of the
        head."""
        self._part.load(self._own.learner, folder, steps, head_steps)
        self._own.moved = steps > 0

    def end(self) -> None:
        """Restore the process as it was before."""
        self._part.end()

    def _first_weights(self) -> ReferenceWeights:
        """Return the weights at the start of training, which are kept from the first call on; all ranks must call it together.
        If the weights have moved by then, as in a resumed run, the folder's are read again."""
        if self._own.reference is None:
            self._own.reference = self._part.first_weights(moved=self._own.moved)
        return self._own.reference

    def _data(
        self, samples: Sequence[Sample], budget: int, *, calculate_entropy: bool, values: Wanted, top: int = 0
    ) -> Any:
        """Return rows in verl's form: packed ids, with a number for each row by which its tokens are found. A pass over them
        computes `values`, and as many most probable tokens at each place as `top` says."""
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
            **{WANTED: values, TOP: top},
            **({MASKS: RowMasks(samples)} if any(sample.mask is not None for sample in samples) else {}),
        )
        return data


def _read_beside(config: Any, max_model_len: int | None) -> Any:
    """Load another model as a verl engine, sharded over the same ranks. All ranks must call it."""
    config.model_config.model_type = config.model_type
    config.engine_config.use_remove_padding = True
    engine = api.EngineRegistry.new(
        model_type=config.model_type,
        backend=config.engine_config.strategy,
        model_config=config.model_config,
        engine_config=config.engine_config,
        optimizer_config=config.optimizer_config,
        checkpoint_config=config.checkpoint_config,
    )
    engine.initialize()
    part: Strategy = engine
    part.begin(max_model_len)
    return engine


def _infer(engine: Any, data: Any, name: str) -> torch.Tensor | None:
    """Run a model on rows and return the output `name`; None on a rank without the last layer."""
    output = engine.forward_backward_batch(data, loss_function=None, forward_only=True)
    found: torch.Tensor | None = output["model_output"][name] if output else None
    return found


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _rows(logprobs: torch.Tensor) -> list[FloatArray]:
    """Return logprobs (T,) for each row. verl's entry t is that of token t + 1, so each row is shifted by one."""
    blank = np.array([np.nan], np.float32)
    return [np.append(blank, own[:-1].float().cpu().numpy()) for own in logprobs.unbind()]
