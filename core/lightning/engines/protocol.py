"""The interface of an engine, between the trainer's loop and the object that holds and trains the weights.

The invariant: the loss and its gradient depend on rollouts and tokens, never on how these are cut into samples, ordered, split
into micro-batches or spread over workers. Every normalisation is therefore already inside `Sample.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from lightning.batch.sample import FloatArray, Sample
from lightning.losses.protocol import Loss, LossOutput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """The settings of AdamW, and of the updates in a step: one for each of `minibatches` parts of the rows, in each of `epochs`
    passes."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    minibatches: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """The report of one step. A metric without a measurement is absent from `metrics`, never 0: means of no tokens, gaps if no
    token has a sampler's logprob, `p999_logprob_gap` if too few have one, norm and rate of an update that was not taken, and
    values that are not finite.

    `metrics` has at least `loss`, `grad_norm`, `entropy`, `clip_fraction`, `tokens` (trained), `tokens_forward` (computed),
    `tree` (1 if the rows were computed over their prefix tree, else 0), `max_logprob_gap`, `mean_logprob_gap`,
    `p999_logprob_gap` (the maximum, mean and `logprob_gap.quantile` of |trainer - sampler| before the first update, over the
    `tokens_compared`: unconstrained tokens with a sampler's logprob), `updates` (taken), `stepped` (0 if no update was taken,
    so that the weights did not change) and `skipped_nonfinite` (updates that were not taken because a loss or gradient was not
    finite). These are of the first pass over the rows; `clip_fraction_last` is of the last pass. With a head, also the
    norm of its gradient (`NAME_grad_norm`) and, if it valued states, its own metrics (`Head.metrics`).

    `seen` maps each span to the SHA-256 (hex) of the content of the tensors that the loss was computed on for this span: the
    response ids as little-endian int32 followed by the sampler's logprobs as little-endian float32.
    """

    metrics: Mapping[str, float]
    seen: Mapping[tuple[str, int, int], str]


class Head(Protocol):
    """A description of a head, which `register_heads` registers. It holds no tensors and can be pickled, because an engine may
    make the head in several processes.

    `str(head)` is the name and, after a space, whatever a training state must have in common with the head.
    """

    @property
    def name(self) -> str:
        """The registered name, with which the names of the head's parameters in a training state and of its metrics begin."""

    @property
    def lr(self) -> float:
        """The head's learning rate. A step at another rate than the optimizer's scales it in proportion."""

    @property
    def trains_model(self) -> bool:
        """Whether the head's loss also trains the model under it."""

    def module(self, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device | str | int) -> nn.Module:
        """Return a new head for a model that computes in `dtype`: from hidden states (M, H) after the last norm to their values
        (M,)."""

    def loss(
        self, values: torch.Tensor, targets: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]
    ) -> LossOutput:
        """Return the loss of M states, whose weights are normalised over the step, and sums for `metrics`. All have shape
        (M,)."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step from the sums of `loss`, added up over its parts."""


@runtime_checkable
class Engine(Protocol):
    """The object that holds the trained weights and their optimizer. Methods are synchronous and may take long: call them
    outside of the event loop. All raise `EngineError` with the cause, or `DataError` for samples that cannot be computed on."""

    def open(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        head: Head | None = None,
        reference: Path | None = None,
    ) -> None:
        """Load a `transformers` causal LM folder and make a fresh optimizer; with `head`, also a head that values states.

        `reference` is the folder of the reference model for losses that use one, such as a teacher with the same vocabulary.
        None means that `model` itself, before training, is the reference model.
        """

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the current policy's logprobs, one array of length T for each sample. Index 0 is NaN: nothing precedes it."""

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the head's value of each call's state, one array of shape (spans,) for each sample. Needs `open(head=...)`."""

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step as `StepDriver` does: one update on the clipped gradient of all samples, or several updates on parts of
        them, all at the learning rate `lr` (None: the optimizer's).

        Before each update a `StepLoss` is prepared, and reference logprobs are computed for a loss that needs them. Spans with
        a `value_weight` add the head's loss.
        """

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these samples to the accumulated gradient, without an update; `stepped` is 0. If a loss is not
        finite, discard the whole gradient and raise `NonFiniteError`."""

    def optim_step(self, lr: float | None = None) -> StepResult:
        """Clip the accumulated gradient, update the weights at the rate `lr` (None: the optimizer's), and discard the gradient.
        Raises `EngineError` without a gradient and `NonFiniteError` if it is not finite; the weights are then as before."""

    def save(self, folder: Path) -> None:
        """Write the whole training state (weights, optimizer, random state) atomically; no pickle."""

    def load(self, folder: Path) -> None:
        """Restore the training state that `save` wrote. The next step is bit for bit the step that would have followed then."""

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load (config, tokenizer, safetensors) and return it."""

    def weights(self, file: Path) -> Path:
        """Write the current full weights (Hugging Face names, LoRA merged) as one safetensors file, atomically."""

    def close(self) -> None:
        """Free the engine's memory and processes. Further calls do nothing."""


@runtime_checkable
class WritesAdapters(Protocol):
    """An engine that can write its adapters alone, for a policy server that merges them itself."""

    def adapters(self, file: Path) -> Path | None:
        """Write the adapters as one safetensors file, atomically, and return it; None if only whole weights can be written."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments of `Engine.open` that are an engine's own where several engines share a base model."""

    optimizer: OptimizerConfig
    seed: int
    head: Head | None = None


@runtime_checkable
class SharesBase(Protocol):
    """An engine of adapters that can share the base model in memory with other engines of its class. So the adapters of several
    policies are trained in the memory of one base."""

    def open_sharing(
        self,
        model: Path,
        own: Opening,
        others: Sequence[tuple[Engine, Opening]],
        *,
        reference: Path | None = None,
    ) -> None:
        """Open this engine and the `others`, each as `Engine.open` does, on one base model and one reference model. Adapters,
        optimizer and head are each engine's own. Raises `EngineError` if there are others, and one of all trains all
        weights."""

    def discard_gradient(self) -> None:
        """Discard the gradient that `forward_backward` added up; without one do nothing."""


@runtime_checkable
class TrainsPolicies(Protocol):
    """An engine of several policies, of which each trains on its own rows (`Sample.policy`)."""

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates by policy that hold in place of `rate_of` in `step` and `optim_step`. The caller changes them."""

    def rate_of(self, policy: str, lr: float) -> float:
        """Return the learning rate of a policy in a step for which the run has the rate `lr`."""

    def export_policy(self, policy: str, folder: Path) -> Path:
        """Write the model of one policy, as `Engine.export` does for one."""


@runtime_checkable
class SendsWeights(Protocol):
    """An engine whose weights are in another process than the trainer's, perhaps on another machine."""

    def sender(self) -> object:
        """Return a handle of the process that writes the files of `weights`, for the weight transfers that plugins register
        with `register_weight_transfers`. The engine need not be open yet."""


@runtime_checkable
class ChecksModel(Protocol):
    """An engine that can check, before anything is started, whether it can train a model folder."""

    def check(self, model: Path) -> str:
        """Return the limits of training this folder, in words, such as tensors that are not trained; empty if there are none.

        Reads names and shapes only. Raises `ConfigError` or `EngineError` if the folder cannot be trained, naming why and the
        cure.
        """


@runtime_checkable
class ChecksLoss(Protocol):
    """An engine that gives losses the logprobs of most probable tokens, and can check before anything is started whether it
    can give a loss what it needs."""

    def check_loss(self, model: Path, loss: Loss) -> None:
        """Raise `ConfigError`, naming the loss and the cure, if training this model folder cannot give the loss what it
        needs."""


@runtime_checkable
class ChecksTeacher(Protocol):
    """An engine that can check, before anything is started, whether a teacher can be its reference model."""

    def check_teacher(self, teacher: Path) -> None:
        """Raise `ConfigError` or `EngineError`, naming the reason, if the teacher's folder cannot be the reference model. Reads
        names and shapes only."""


@runtime_checkable
class RevivesWorkers(Protocol):
    """An engine that replaces lost workers by new ones, which go on from the checkpoint of the last step. So a checkpoint is
    written after each step, unless `trainer.checkpoint_every` says otherwise."""

    revives_workers: Literal[True]
