"""What trains: the contract between the trainer's loop and whatever holds the weights.

The invariant: the loss and its gradient depend on rollouts and tokens, never on how they are cut into samples, ordered,
split into micro-batches or spread over workers. Every normalisation is therefore already inside `Sample.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from lightning.batch.sample import FloatArray, Sample
from lightning.losses.protocol import Loss


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW, and how many updates a step takes: one for each of `minibatches` parts of the rows, in each of `epochs` passes.
    A critic has its own rate, `critic_lr`: where a step is given another rate than `lr`, the critic's changes in proportion."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    critic_lr: float = 0.05
    minibatches: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports. What was not measured is absent from `metrics`, and never 0: means of no tokens, the gaps where no
    token has a sampler's logprob, `p999_logprob_gap` where too few have one, the norm and rate of an update that was not taken,
    what is not finite.

    Measured, there are at least `loss`, `grad_norm`, `entropy`, `clip_fraction`, `tokens` (trained), `tokens_forward`
    (computed), `tree` (1 where the rows were computed over their prefix tree, else 0), `max_logprob_gap`,
    `mean_logprob_gap`, `p999_logprob_gap` (|trainer - sampler| before the first update, over unconstrained tokens that have a
    sampler logprob, `tokens_compared`: at the most, in the mean, and `logprob_gap.quantile`), `updates` (taken), `stepped`
    (0 when there was none and the weights were left alone) and `skipped_nonfinite` (updates that were left out because a loss
    or gradient was not finite). They are of the first pass over the rows; `clip_fraction_last` is of the last. Where states
    were valued:
    `value_loss`, `value_mean`, `value_target`, `value_explained_variance` (`losses.value.value_metrics`) and
    `critic_grad_norm`.

    `seen` maps each span to the SHA-256 (hex) of what was actually in the tensors the loss was computed on for that
    span: the response ids as little-endian int32 followed by the sampler's logprobs as little-endian float32.
    """

    metrics: Mapping[str, float]
    seen: Mapping[tuple[str, int, int], str]


class Engine(Protocol):
    """Holds the trained weights and their optimizer. Methods are synchronous and may take long: call them off the event
    loop. All raise `EngineError` with the cause, or `DataError` for samples that cannot be computed on."""

    def open(
        self, model: Path, optimizer: OptimizerConfig, *, seed: int, critic: bool = False, reference: Path | None = None
    ) -> None:
        """Load a `transformers` causal LM folder and make a fresh optimizer; with `critic`, also a head that values states.

        The folder is also the reference model of losses that compare with one, unless `reference` is another's (a teacher's),
        whose vocabulary is the same. It is given only where there is one.
        """

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Current policy's logprobs, one array of length T per sample (index 0 is NaN: nothing precedes it)."""

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The critic's value of each call's state, one array of shape (spans,) per sample. Needs `open(critic=True)`."""

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step as `StepDriver` does: one update on the gradient of all samples, clipped, or several on parts of them,
        all at the rate `lr` (none: the optimizer's).

        A `StepLoss` is prepared first, reference logprobs are computed where it asks for them, and spans with a
        `value_weight` add the critic's loss.
        """

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these samples to what is there; no update. `stepped` is 0. Raises `NonFiniteError`, and forgets
        the whole gradient, where a loss is not finite."""

    def optim_step(self, lr: float | None = None) -> StepResult:
        """Clip the gradient, update at this rate (none: the optimizer's), and forget it. Raises `EngineError` without a
        gradient, `NonFiniteError` where it is not finite; the weights are then as before."""

    def save(self, folder: Path) -> None:
        """Write the whole training state (weights, optimizer, random state) atomically; no pickle."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the next step is bit for bit the one that would have followed."""

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load (config, tokenizer, safetensors) and return it."""

    def weights(self, file: Path) -> Path:
        """Write the current full weights (Hugging Face names, LoRA merged) as one safetensors file, atomically."""

    def close(self) -> None:
        """Free what the engine holds. Idempotent."""


@runtime_checkable
class WritesAdapters(Protocol):
    """An engine that trains adapters can write these alone, for a policy server that merges them itself."""

    def adapters(self, file: Path) -> Path | None:
        """Write the adapters as one safetensors file, atomically; None where only whole weights will do."""


@runtime_checkable
class SendsWeights(Protocol):
    """An engine whose weights are in another process than the trainer's, which may be on another machine."""

    def sender(self) -> object:
        """The process that writes the files of `weights`, as one that sends them, for what plugins register with
        `register_weight_transfers`. The engine need not be open yet."""


@runtime_checkable
class ChecksModel(Protocol):
    """An engine that can say, before anything is started, whether it can train a model folder."""

    def check(self, model: Path) -> str:
        """What of the folder may not be expected, in words, such as tensors that are not trained; empty when nothing is.

        Reads names and shapes only. Raises `ConfigError` or `EngineError` naming what cannot be trained, and the cure.
        """


@runtime_checkable
class ChecksTeacher(Protocol):
    """An engine that can say, before anything is started, whether a teacher can be its reference model."""

    def check_teacher(self, teacher: Path) -> None:
        """Raises `ConfigError` or `EngineError` naming why it cannot. Of the folder, names and shapes are read only."""


@runtime_checkable
class RevivesWorkers(Protocol):
    """An engine whose lost workers go on from a checkpoint of the last step: one is written after each step, unless
    `trainer.checkpoint_every` says otherwise."""

    revives_workers: Literal[True]
