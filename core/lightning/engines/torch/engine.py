"""The torch engine: one process, a CPU or one CUDA device, any `transformers` causal LM, full weights or LoRA.

The invariant: the gradient of a step is the exact sum of its rows' gradients, whatever the micro-batches; and a step is
taken wholly or, when its loss or gradient is not finite, not at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from lightning.batch.sample import FloatArray, Sample
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.torch import rows
from lightning.engines.torch.forest import Forest, token_batch, tree_pays
from lightning.engines.torch.logprobs import token_logprobs
from lightning.engines.torch.model import CausalLM, load_model, resolve_device
from lightning.engines.torch.state import Progress, load_state, save_state
from lightning.engines.torch.tally import Tally
from lightning.engines.torch.tree import why_no_tree
from lightning.engines.torch.weights import write_model, write_weights
from lightning.errors import EngineError
from lightning.losses.protocol import Loss, TokenBatch

if TYPE_CHECKING:
    from lightning.config import LoraConfig
    from lightning.config.models import StepKind

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say when memory runs out outside torch's CUDA allocator: in the driver, in a library, on a CPU."""


class TorchEngine:
    """Implements `lightning.engines.protocol.Engine`. Arguments are those of `EngineConfig`; `dtype` may also be `float64`."""

    def __init__(
        self,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        tokens_per_microbatch: int = 8192,
        gradient_checkpointing: bool = False,
        lora: LoraConfig | None = None,
        step: StepKind = "linear",
    ) -> None:
        self._dtype, self._device_name, self._threads, self._kind = dtype, device, threads, step
        self._budget, self._gradient_checkpointing, self._lora = tokens_per_microbatch, gradient_checkpointing, lora
        self._lm: CausalLM | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._config = OptimizerConfig()
        self._parameters: dict[str, nn.Parameter] = {}
        self._steps = 0
        self._no_tree: str | None = None

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int, critic: bool = False) -> None:
        """Load a model folder and make a fresh optimizer. Sets torch's CPU threads and random seed for the process."""
        if critic:
            raise EngineError("the torch engine has no critic: use an algorithm without one")
        device = resolve_device(self._device_name)
        if device.type == "cpu" and self._threads:
            torch.set_num_threads(self._threads)
        torch.manual_seed(seed)
        self._lm = load_model(
            model,
            dtype=self._dtype,
            device=device,
            lora=self._lora,
            gradient_checkpointing=self._gradient_checkpointing,
        )
        self._parameters = self._lm.trainable()
        self._optimizer = _adamw(self._parameters, optimizer)
        self._config, self._steps, self._no_tree = optimizer, 0, None

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Current policy's logprobs at each sample's temperature, shape (T,) each; index 0 is NaN."""
        lm = self._opened()
        for sample in samples:
            rows.check(sample, lm.vocab_size)
        results = [np.full(len(sample), np.nan, dtype=np.float32) for sample in samples]
        longer = [index for index, sample in enumerate(samples) if len(sample) > 1]
        with lm.evaluating():
            for places in rows.plan([len(samples[index]) for index in longer], self._budget):
                part = [samples[longer[place]] for place in places]
                lengths = [len(sample) for sample in part]
                values = _forward(lm, rows.collate(part, lengths, lm.device, every=True))[0].float().cpu().numpy()
                ends = np.cumsum([length - 1 for length in lengths])
                for place, own in zip(places, np.split(values, ends[:-1]), strict=True):
                    results[longer[place]][1:] = own
        return results

    def step(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """One optimizer step on the sum of the rows' losses. Without any weight no step is taken (`stepped` is 0).

        Only the engine knows the vocabulary, so the engine refuses ids outside it. vLLM cannot have served one: it samples
        from the model's own vocabulary, and its model has no embedding for more. So such a row is another model's.

        Raises `DataError` for a row that cannot be computed on and `EngineError` for a loss or gradient that is not finite;
        the weights are then as before.
        """
        lm, optimizer = self._opened(), self._opened_optimizer()
        for sample in samples:
            rows.check(sample, lm.vocab_size)
        trained = [sample for sample in samples if sample.weights.any()]
        if self._kind == "per-call":
            trained = [row for sample in trained for row in rows.by_call(sample)]
        tally = self._accumulate(trained, loss)
        if not trained:
            return StepResult({**tally.metrics(), "grad_norm": 0.0, "lr": 0.0, "stepped": 0.0}, {})
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))
        if not math.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            raise EngineError(
                f"the gradient is not finite at step {self._steps}, so the step was not taken and the weights are as "
                "before: lower engine.lr or use float32"
            )
        rate = self._config.lr * min(1.0, (self._steps + 1) / max(1, self._config.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return StepResult({**tally.metrics(), "grad_norm": norm, "lr": rate, "stepped": 1.0}, tally.seen)

    def save(self, folder: Path) -> None:
        """Write the whole training state to a folder, atomically; one that exists is replaced."""
        lm, optimizer = self._opened(), self._opened_optimizer()
        progress = Progress(self._steps, self._budget, self._config)
        save_state(folder, self._parameters, optimizer, progress, lm.device)

    def load(self, folder: Path) -> None:
        """Restore a saved state into the opened model; the optimizer's settings stay those given to `open`.

        The next step is then bit for bit the one that would have followed on a CPU; on CUDA the attention kernels' own
        order of summation may differ between any two runs. For that the micro-batch size comes back too, as small as a
        shortage of memory had made it, whatever `tokens_per_microbatch` says now.
        """
        lm, optimizer = self._opened(), self._opened_optimizer()
        progress = load_state(folder, self._parameters, optimizer, lm.device)
        self._steps, self._budget = progress.steps, progress.tokens_per_microbatch

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load, LoRA merged; return it."""
        return write_model(self._opened(), folder)

    def weights(self, file: Path) -> Path:
        """Write the current full weights as one safetensors file, LoRA merged; return it."""
        return write_weights(self._opened(), file)

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self._lm, self._optimizer, self._parameters = None, None, {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _opened(self) -> CausalLM:
        if self._lm is None:
            raise EngineError("the engine has no model: call open() first")
        return self._lm

    def _opened_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineError("the engine has no model: call open() first")
        return self._optimizer

    def _accumulate(self, samples: Sequence[Sample], loss: Loss) -> Tally:
        """Sum the gradients of all rows. When memory runs out, begin again with half the micro-batch."""
        optimizer = self._opened_optimizer()
        lengths = [rows.trained_length(sample) for sample in samples]
        while True:
            optimizer.zero_grad(set_to_none=True)
            tally = Tally()
            try:
                if self._is_tree(samples, lengths):
                    self._backward_tree(samples, lengths, loss, tally)
                else:
                    self._backward_rows(samples, lengths, loss, tally)
            except torch.OutOfMemoryError as error:
                self._shrink(max(lengths), error)
            except BaseException:
                optimizer.zero_grad(set_to_none=True)
                raise
            else:
                return tally

    def _is_tree(self, samples: Sequence[Sample], lengths: Sequence[int]) -> bool:
        """Whether the step goes over the prefix tree; `auto` wants enough shared tokens to pay for the smaller pieces."""
        if self._kind not in ("auto", "tree") or not samples:
            return False
        if self._no_tree is None:
            self._no_tree = why_no_tree(self._opened())
            if self._no_tree:
                logger.info("rows are computed one by one, not as a tree: %s", self._no_tree)
        return not self._no_tree and (self._kind == "tree" or tree_pays(samples, lengths))

    def _backward_tree(self, samples: Sequence[Sample], lengths: Sequence[int], loss: Loss, tally: Tally) -> None:
        forest = Forest.of(self._opened(), samples, lengths)
        where = f"{len(samples)} rows ({rows.name(samples[0])} to {rows.name(samples[-1])})"

        def loss_of(batch: TokenBatch) -> torch.Tensor:
            return self._loss_of(batch, loss, tally, where)

        with failing("pass over the tree", where):
            computed = forest.accumulate(self._budget, loss_of)
        tally.computed(computed, forest.digests())

    def _backward_rows(self, samples: Sequence[Sample], lengths: Sequence[int], loss: Loss, tally: Tally) -> None:
        lm = self._opened()
        for indices in rows.plan(lengths, self._budget):
            chosen = [samples[index] for index in indices]
            part = rows.collate(chosen, [lengths[index] for index in indices], lm.device, every=False)
            logprobs, entropy = _forward(lm, part)
            batch = token_batch(logprobs, entropy, part.old_logprobs, part.advantages, part.weights)
            total = self._loss_of(batch, loss, tally, f"the rows of {rows.name(chosen[0])} to {rows.name(chosen[-1])}")
            with failing("backward pass", part.text):
                total.backward()  # type: ignore[no-untyped-call]
            tally.computed(part.ids.numel(), part.digests())

    def _loss_of(self, batch: TokenBatch, loss: Loss, tally: Tally, where: str) -> torch.Tensor:
        """The loss of some tokens, counted. Raises `EngineError` when it is not finite."""
        output = loss(batch)
        value = float(output.loss.detach())
        if not math.isfinite(value):
            raise EngineError(
                f"the loss is {value} at step {self._steps} in {where}, so the step was not taken and the weights are as "
                "before"
            )
        tally.add(batch, value, output.metrics)
        return output.loss

    def _shrink(self, longest: int, error: torch.OutOfMemoryError) -> None:
        if self._budget <= longest:
            raise EngineError(
                f"out of memory on a single row of {longest} tokens: set engine.gradient_checkpointing = true, train LoRA "
                "adapters (engine.lora), or shorten the agent's calls (policy_server.max_model_len)"
            ) from error
        self._budget = max(longest, self._budget // 2)
        logger.warning("out of memory: going on with %d tokens per micro-batch", self._budget)


def _forward(lm: CausalLM, part: rows.Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies (N,) of the wanted tokens."""
    with failing("forward pass", part.text), lm.computing():
        hidden = lm.hidden(part.ids[:, :-1])
        before = part.rows * hidden.shape[1] + part.columns - 1
        wanted = hidden.flatten(0, 1).index_select(0, before)
        return token_logprobs(wanted, part.targets, part.temperatures, lm.logits, lm.vocab_size)


@contextmanager
def failing(doing: str, what: str) -> Iterator[None]:
    """Whatever torch raises in a pass becomes an `EngineError`; a shortage of memory always an `OutOfMemoryError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        if any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise torch.OutOfMemoryError(str(error)) from error
        raise EngineError(f"the {doing} failed on {what}: {error}") from error


def _adamw(parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101); matrices decay, norms and biases do not."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
