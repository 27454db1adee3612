"""What trains: the contract between the trainer's loop and whatever holds the weights.

The invariant: the loss and its gradient depend on rollouts and tokens, never on how they are cut into samples, ordered,
split into micro-batches or spread over workers. Every normalisation is therefore already inside `Sample.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one transition's response lies inside a sample: tokens `[start, stop)` of `ids` are its action."""

    rollout: str
    attempt: int
    seq: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of T tokens, aligned so that every array has length T and index t speaks of token t.

    `weights[t]` is the token's share of the loss (0 = not trained: prompts, tool results, other agents), already
    normalised over the whole step. `advantages[t]` and `logprobs[t]` (the sampler's; NaN where it gave none) hold where
    `weights[t] != 0`; `versions[t]` is the policy version that sampled the token (-1 for tokens that were not sampled).
    `temperature` is the one the row's responses were sampled with.
    """

    ids: IntArray
    weights: FloatArray
    advantages: FloatArray
    logprobs: FloatArray
    versions: IntArray
    spans: tuple[Span, ...]
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, flat, as torch tensors of shape (N,): what a loss function sees."""

    logprobs: torch.Tensor
    """Current policy's logprobs of the sampled tokens; the gradient flows through it."""
    old_logprobs: torch.Tensor
    """Logprobs the ratio is taken against (the sampler's where known, else the current ones detached)."""
    advantages: torch.Tensor
    weights: torch.Tensor
    entropy: torch.Tensor
    """Entropy (nats) of the current policy at each token, differentiable."""
    has_old: torch.Tensor
    """Bool: the sampler gave a logprob for this token."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is a scalar: the weighted *sum* over the micro-batch's tokens. `metrics` are weighted sums too (detached)."""

    loss: torch.Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)


class Loss(Protocol):
    """A pure function from tokens to a loss. It must be a sum over tokens of `weights * something`, so that splitting
    the tokens over calls changes nothing."""

    def __call__(self, batch: TokenBatch) -> LossOutput: ...


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedule. `warmup_steps` rises linearly to `lr`; afterwards the rate is constant."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step reports. `metrics` has at least `loss`, `grad_norm`, `entropy`, `clip_fraction`,
    `tokens` (trained), `tokens_forward` (computed), `max_logprob_gap`, `mean_logprob_gap` (|trainer - sampler| before the
    update, over unconstrained tokens that have a sampler logprob).

    `seen` maps each span to the SHA-256 (hex) of what was actually in the tensors the loss was computed on for that
    span: the response ids as little-endian int32 followed by the sampler's logprobs as little-endian float32.
    """

    metrics: Mapping[str, float]
    seen: Mapping[tuple[str, int, int], str]


class Engine(Protocol):
    """Holds the trained weights and their optimizer. Methods are synchronous and may take long: call them off the event
    loop. All raise `EngineError` with the cause."""

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int) -> None:
        """Load a `transformers` causal LM folder and make a fresh optimizer."""

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Current policy's logprobs, one array of length T per sample (index 0 is NaN: nothing precedes it)."""

    def step(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Accumulate the gradient of all samples, clip, and take one optimizer step."""

    def save(self, folder: Path) -> None:
        """Write the whole training state (weights, optimizer, schedule, random state) atomically; no pickle."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the next step is bit for bit the one that would have followed."""

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load (config, tokenizer, safetensors) and return it."""

    def weights(self, file: Path) -> Path:
        """Write the current full weights (Hugging Face names, LoRA merged) as one safetensors file, atomically."""

    def close(self) -> None: ...
