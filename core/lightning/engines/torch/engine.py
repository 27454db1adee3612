"""The torch engine: it trains any `transformers` causal LM in one process, on a CPU or one CUDA device, full weights or LoRA.

The invariant: the gradient of an update is the exact sum of its rows' gradients, whatever the micro-batches; and an update is
taken wholly or, if its loss or gradient is not finite, not at all.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import nn

from lightning.batch.sample import FloatArray, Sample
from lightning.engines import rows
from lightning.engines.export import contents, whole_weights, write_adapters, write_file, write_folder
from lightning.engines.loading import read_model, vocab_size
from lightning.engines.protocol import Engine, Head, Opening, OptimizerConfig, StepResult
from lightning.engines.rows import (
    Read,
    States,
    Tally,
    Tokens,
    reordered,
    row_order,
    states_of,
    trained_tokens,
    wanted_tokens,
)
from lightning.engines.step import (
    MORE_ROOM,
    SMALLER_ROWS,
    MadeHead,
    NonFiniteError,
    StepDriver,
    is_prepared,
    needing_room,
    no_head,
    prepared,
    refuse_targets,
)
from lightning.engines.torch.layouts import Forest, GradientPass, Layout, Linear, read_logprobs, read_values
from lightning.engines.torch.model import CausalLM, Reference, load_model, resolve_device
from lightning.engines.torch.state import Progress, load_state, save_state
from lightning.engines.torch.tree import why_no_tree
from lightning.errors import EngineError
from lightning.losses.protocol import Loss, check_top_logprobs, needs_top_logprobs
from lightning.types import Json

if TYPE_CHECKING:
    from lightning.config import LoraConfig
    from lightning.config.sections import StepKind

logger = logging.getLogger(__name__)
T = TypeVar("T")

ONLY_ADAPTERS = "only adapters share a base model: set engine.lora for all torch engines that share one"


class TorchEngine:
    """The torch implementation of `lightning.engines.protocol.Engine`. Arguments are those of `EngineConfig`; `dtype` may also
    be `float64`, and `max_model_len` is the policy server's (`engines.loading.served_length`)."""

    def __init__(
        self,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        tokens_per_microbatch: int = 8192,
        gradient_checkpointing: bool = False,
        lora: LoraConfig | None = None,
        max_model_len: int | None = None,
        step: StepKind = "auto",
        max_nonfinite_steps: int = 3,
    ) -> None:
        self._dtype, self._device_name, self._threads, self._kind = dtype, device, threads, step
        self._budget, self._gradient_checkpointing, self._lora = tokens_per_microbatch, gradient_checkpointing, lora
        self._served = max_model_len
        self._lm: CausalLM | None = None
        self._reference: Reference | None = None
        self._head: MadeHead | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._config = OptimizerConfig()
        self._parameters: dict[str, nn.Parameter] = {}
        self._no_tree: str | None = None
        self._driver = StepDriver(max_nonfinite_steps)
        self._known: Layout | None = None
        """The layout of the rows that were prepared last, which the next gradient probably uses."""
        self._summed: list[tuple[Layout, Loss]] = []
        """The rows and losses whose gradients are added up so far."""

    def check(self, model: Path) -> str:
        """Return the limits of training a model folder, in words, or raise if it cannot be trained (`ChecksModel`)."""
        return contents(model, lora=self._lora, max_model_len=self._served).remark()

    def check_loss(self, model: Path, loss: Loss) -> None:
        """Raise `ConfigError` for a loss that wants more tokens than the model in this folder has (`ChecksLoss`)."""
        check_top_logprobs(loss, vocab_size(model))

    def check_teacher(self, teacher: Path) -> None:
        """Raise `EngineError` if a folder cannot be loaded as the reference model (`ChecksTeacher`)."""
        read_model(teacher, device_map="meta")

    def open(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        head: Head | None = None,
        reference: Path | None = None,
    ) -> None:
        """Load a model folder and make a fresh optimizer. Sets torch's CPU threads and random seed for the process."""
        lm = self._load(model, seed)
        self._reference = Reference(lm, lora=self._lora is not None, folder=reference, max_model_len=self._served)
        self._begin(lm, optimizer, seed, head)

    def open_sharing(
        self,
        model: Path,
        own: Opening,
        others: Sequence[tuple[Engine, Opening]],
        *,
        reference: Path | None = None,
    ) -> None:
        """Open this engine, and others with adapters on its base model (`SharesBase.open_sharing`). Sets torch's CPU threads
        and random seed for the process."""
        if others and self._lora is None:
            raise EngineError(ONLY_ADAPTERS)
        self.open(model, own.optimizer, seed=own.seed, head=own.head, reference=reference)
        for other, its in others:
            if not isinstance(other, TorchEngine):
                raise EngineError(ONLY_ADAPTERS)
            other.open_beside(self, its)

    def open_beside(self, first: TorchEngine, own: Opening) -> None:
        """Open with new adapters on the base model of another torch engine, which is open. Raises `EngineError` if one of the
        two trains all weights."""
        shared = first.shared() if self._lora else None
        if shared is None:
            raise EngineError(ONLY_ADAPTERS)
        base, reference = shared
        lm = self._load(base.folder, own.seed, base)
        self._reference = reference.beside(lm)
        self._begin(lm, own.optimizer, own.seed, own.head)

    def shared(self) -> tuple[CausalLM, Reference] | None:
        """Return the open model and its reference model, on whose base other engines can train adapters; None if this engine
        trains all weights."""
        lm, reference = self._opened(), self._reference
        return None if self._lora is None or reference is None else (lm, reference)

    def _load(self, folder: Path, seed: int, base: CausalLM | None = None) -> CausalLM:
        device = resolve_device(self._device_name)
        if device.type == "cpu":
            self._threads = self._threads or torch.get_num_threads()
            torch.set_num_threads(self._threads)
        torch.manual_seed(seed)
        with needing_room(f"loading {folder} onto {device}"):
            return load_model(
                folder,
                dtype=self._dtype,
                device=device,
                lora=self._lora,
                gradient_checkpointing=self._gradient_checkpointing,
                max_model_len=self._served,
                base=base,
            )

    def _begin(self, lm: CausalLM, optimizer: OptimizerConfig, seed: int, head: Head | None) -> None:
        self._lm, self._parameters = lm, lm.trainable()
        self._head = MadeHead(head, head.module(lm.model, dtype=lm.dtype, device=lm.device)) if head else None
        self._optimizer = _adamw(self._parameters, self._head, optimizer)
        self._config, self._no_tree = optimizer, None
        self._driver.begin(optimizer, seed)
        self.discard_gradient()

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the current policy's logprobs at each sample's temperature, shape (T,) each; index 0 is NaN."""
        self._checked(samples)
        lengths = [len(sample) for sample in samples]
        tokens = wanted_tokens(samples, [np.arange(1, length) for length in lengths])
        layout = Linear(samples, lengths, tokens, states_of((), every=True))
        found = self._read(layout, reference=False).logprobs.astype(np.float32)
        return [np.append(np.float32(np.nan), own) for own in _apart(found, [length - 1 for length in lengths])]

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the head's value of the state before each span, shape (spans,) for each sample."""
        lm, head = self._checked(samples), self._head
        if head is None:
            raise no_head()
        lengths = [max((span.start for span in sample.spans), default=0) + 1 for sample in samples]
        layout = self._layout(samples, lengths, wanted_tokens((), ()), states_of(samples, every=True))
        found = self._within_memory(layout, lambda: read_values(layout, lm, head.module, self._budget)).astype(
            np.float32
        )
        return _apart(found, [len(sample.spans) for sample in samples])

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step on the sum of the rows' losses (`StepDriver.step`).

        Raises `DataError` for a row that cannot be computed on, also for a token id outside of the model's vocabulary, which
        only a policy server of another model can have sampled. Raises `EngineError` if more than `max_nonfinite_steps` updates
        in a row are not finite.
        """
        self._check_trainable(samples, loss)
        try:
            self.discard_gradient()
            return self._driver.step(self, samples, loss, lr)
        finally:
            self.discard_gradient()
            torch.cuda.empty_cache()  # a vLLM on the same GPU needs its memory back; does nothing without a GPU

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these rows to the accumulated gradient, without an update (`Engine.forward_backward`)."""
        self._check_trainable(samples, loss)
        try:
            return self._driver.forward_backward(self, samples, loss)
        except BaseException:
            self.discard_gradient()
            raise
        finally:
            torch.cuda.empty_cache()

    def optim_step(self, lr: float | None = None) -> StepResult:
        """Update the weights on the accumulated gradient, and discard the gradient (`Engine.optim_step`)."""
        self._opened()
        try:
            return self._driver.optim_step(self, lr)
        finally:
            torch.cuda.empty_cache()

    def prepare(self, samples: Sequence[Sample], loss: Loss) -> Sequence[Sample]:
        """Return the rows with the numbers that the loss needs of their tokens before the gradient pass
        (`Computer.prepare`)."""
        if not is_prepared(loss):
            return samples
        layout = self._step_layout(samples)
        tokens = reordered(layout.tokens, row_order(layout.tokens))
        current = partial(self._read, layout, reference=False, top=needs_top_logprobs(loss))
        found = prepared(loss, samples, tokens, current, lambda: self._read(layout, reference=True).logprobs)
        self._known = layout.again(found)
        return found

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int) -> Tally:
        """Add the gradient of these rows to the accumulated gradient (`Computer.accumulate`). If memory runs out, the whole
        accumulated gradient is computed again in smaller micro-batches."""
        lm, known, self._known = self._opened(), self._known, None
        if self._kind == "per-call":
            samples, known = [row for sample in samples for row in rows.by_call(sample)], None
        layout = known if known is not None and _are(known.samples, samples) else self._step_layout(samples)
        added = [(layout, loss)]  # the rows to add; after a lack of memory, all rows of the accumulated gradient

        def attempt() -> Tally:
            nonlocal added
            todo, added = added, [*self._summed, (layout, loss)]
            if len(todo) == len(added):
                self._opened_optimizer().zero_grad(set_to_none=True)
            return [GradientPass(lm, each, own, self._head, step).run(self._budget) for each, own in todo][-1]

        try:
            tally = self._within_memory(layout, attempt)
        except BaseException:
            self.discard_gradient()
            raise
        self._summed.append((layout, loss))
        return tally

    def update(self, lr: float, step: int) -> dict[str, float]:
        """Clip the gradient, update the weights, discard the gradient, and return its norms (`Computer.update`)."""
        optimizer = self._opened_optimizer()
        try:
            norms = self._clipped(step)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["head"].lr / self._config.lr if group["head"] else lr
            cures = f"it may have been taken in part, so resume the run; {MORE_ROOM}"
            with needing_room(f"taking step {step}", cures):
                optimizer.step()  # the first step allocates the moments
        finally:
            self.discard_gradient()
        return norms

    def discard_gradient(self) -> None:
        """Discard the accumulated gradient (`SharesBase.discard_gradient`)."""
        self._driver.dropped()
        self._summed, self._known = [], None
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        """Write the whole training state to a folder, atomically; an existing folder is replaced."""
        lm, optimizer = self._opened(), self._opened_optimizer()
        progress = Progress(self._driver.steps, self._budget, self._config, str(self._head.kind) if self._head else "")
        save_state(folder, self._learning(), optimizer, progress, lm.device)

    def load(self, folder: Path) -> None:
        """Restore a saved state into the opened model; the optimizer's settings stay those given to `open`.

        On a CPU the next step is then bit for bit the step that would have followed the saved state; on CUDA the attention
        kernels' order of summation may differ between any two runs. So the micro-batch size is restored too, as small as a lack
        of memory had made it; if `tokens_per_microbatch` is smaller now, that is used, and sums round differently. The
        reference model is not part of the state.
        """
        lm, optimizer = self._opened(), self._opened_optimizer()
        with needing_room(f"loading the training state in {folder}"):
            progress = load_state(
                folder, self._learning(), optimizer, lm.device, head=str(self._head.kind) if self._head else ""
            )
        saved = progress.tokens_per_microbatch
        if saved < self._budget:
            logger.warning("going on with the %d tokens per micro-batch that the training state was saved with", saved)
        self._driver.steps, self._budget = progress.steps, min(saved, self._budget)
        self.discard_gradient()

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load, adapters merged, and return it."""
        lm = self._opened()
        return write_folder(lm.folder, self._whole(), lm.dtype, folder)

    def weights(self, file: Path) -> Path:
        """Write the current full weights as one safetensors file, adapters merged, and return it."""
        lm = self._opened()
        return write_file(lm.folder, self._whole(), lm.dtype, file)

    def adapters(self, file: Path) -> Path | None:
        """Write the adapters alone and return the file; None if all weights are trained, or if the model folder stores an
        adapted layer in another form."""
        lm = self._opened()
        return write_adapters(lm.folder, lm.model, lm.dtype, file) if self._lora is not None else None

    def numerics(self) -> dict[str, Json]:
        """Return the engine's numerics: dtype, device, threads and tokens per micro-batch (`trainer.context.Numeric`)."""
        lm = self._opened()
        return {
            "dtype": str(lm.dtype).removeprefix("torch."),
            "device": lm.device.type if lm.device.type == "cpu" else torch.cuda.get_device_name(lm.device),
            "threads": self._threads or torch.get_num_threads(),
            "tokens_per_microbatch": self._budget,
        }

    def close(self) -> None:
        """Free the model's memory. Further calls do nothing."""
        self._lm, self._reference, self._head, self._optimizer, self._parameters = None, None, None, None, {}
        gc.collect()  # a model's modules refer to each other, and Python would collect such cycles too late
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        lm = self._opened()
        with needing_room("gathering the weights"):
            yield from whole_weights(lm.model, lm.dtype)

    def _opened(self) -> CausalLM:
        if self._lm is None:
            raise EngineError("the engine has no model: call open() first")
        return self._lm

    def _opened_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineError("the engine has no model: call open() first")
        return self._optimizer

    def _checked(self, samples: Sequence[Sample]) -> CausalLM:
        """Check that these rows can be computed on, set torch's number of threads for this thread, and return the model. Raises
        `DataError` for a bad row."""
        lm = self._opened()
        if lm.device.type == "cpu" and self._threads:
            torch.set_num_threads(self._threads)  # torch keeps this number by thread, and any thread may call
        for sample in samples:
            rows.check(sample, lm.vocab_size)
        return lm

    def _check_trainable(self, samples: Sequence[Sample], loss: Loss) -> None:
        check_top_logprobs(loss, self._checked(samples).vocab_size)
        if self._head is None:
            refuse_targets(samples)

    def _learning(self) -> dict[str, nn.Parameter]:
        """Return all parameters that the optimizer changes, by name: the policy's and the head's."""
        return self._parameters | (self._head.parameters() if self._head else {})

    def _read(self, layout: Layout, *, reference: bool, top: int = 0) -> Read:
        """Return the numbers of a layout's tokens in the order of the rows (`read_logprobs`), under the reference model or
        under the trained one."""
        lm, source = self._opened(), self._reference
        with source.model() if reference and source is not None else nullcontext(lm) as model:
            if reference and source is not None and isinstance(layout, Forest):
                if source.takes_trees is None:
                    source.takes_trees = not why_no_tree(model)
                layout = layout if source.takes_trees else layout.by_rows()
            return self._within_memory(layout, lambda: read_logprobs(layout, model, self._budget, top))

    def _step_layout(self, samples: Sequence[Sample]) -> Layout:
        lengths = [rows.trained_length(sample) for sample in samples]
        return self._layout(samples, lengths, trained_tokens(samples), states_of(samples, every=False))

    def _layout(self, samples: Sequence[Sample], lengths: Sequence[int], tokens: Tokens, states: States) -> Layout:
        """Return the layout of rows: a tree by `engine.step` = "tree", or = "auto" if the rows share enough tokens, and if the
        model can be computed over trees; else row by row."""
        if self._kind in ("auto", "tree") and samples:
            forest = Forest.of(samples, lengths, tokens, states)
            if (self._kind == "tree" or forest.pays) and self._takes(forest):
                return forest
        return Linear(samples, lengths, tokens, states)

    def _takes(self, forest: Forest) -> bool:
        """Whether the model can be computed over a tree. If it cannot, that is logged once, with the cost in tokens."""
        if self._no_tree is None:
            lm = self._opened()
            self._no_tree = why_no_tree(lm)
            if self._no_tree:
                unique, count = len(forest.tree.ids), sum(forest.lengths)
                logger.log(
                    logging.WARNING if self._kind == "tree" else logging.INFO,
                    "%s (%s) is computed row by row, not as a tree: %s. It costs %.1f times the tokens: %d, of which %d are "
                    'unique, in the first step. To accept that, set engine.step = "linear"; else train a model that attends '
                    "to all earlier tokens in every layer",
                    type(lm.model).__name__,
                    lm.folder,
                    self._no_tree,
                    count / unique,
                    count,
                    unique,
                )
        return not self._no_tree

    def _clipped(self, step: int) -> dict[str, float]:
        """Clip the policy's gradient and the head's, each by its own norm, and return the norms before clipping.

        Raises `NonFiniteError` if a norm is not finite.
        """
        norms = {"grad_norm": float(nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))}
        if self._head is not None:
            own = self._head.module.parameters()
            norms[f"{self._head.kind.name}_grad_norm"] = float(
                nn.utils.clip_grad_norm_(own, self._config.max_grad_norm)
            )
        if not all(map(math.isfinite, norms.values())):
            largest = _largest([sample for layout, _ in self._summed for sample in layout.samples])
            raise NonFiniteError(f"the gradient is not finite at step {step} (the largest advantage is {largest})")
        return norms

    def _within_memory(self, layout: Layout, attempt: Callable[[], T]) -> T:
        """Call `attempt` and return its result. If memory runs out, halve the micro-batch size for good and call it again.
        Raises `EngineError` if memory runs out at the layout's smallest size."""
        least = layout.least
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if self._budget <= least:
                    raise EngineError(
                        f"out of memory on {layout.least_text}: set engine.gradient_checkpointing = true and resume; or "
                        f"{SMALLER_ROWS}"
                    ) from error
            self._budget = max(least, self._budget // 2)
            logger.warning("out of memory: going on with %d tokens per micro-batch", self._budget)


def _apart(values: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    """Split the numbers of all rows into one array for each row, of the lengths `counts`."""
    return np.split(values, np.cumsum(counts)[:-1]) if counts else []


def _are(some: Sequence[Sample], others: Sequence[Sample]) -> bool:
    """Whether both are the same row objects in the same order."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _largest(samples: Sequence[Sample]) -> str:
    """Return, for messages, the largest absolute advantage of the rows' trained tokens, and the calls of its row."""
    trained = [(np.abs(sample.advantages[sample.weights != 0]).max(initial=0.0), sample) for sample in samples]
    size, sample = max(trained, key=lambda item: item[0])
    return f"{size:g}, in {rows.name(sample)}"


def _adamw(
    parameters: dict[str, nn.Parameter], head: MadeHead | None, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return AdamW (arXiv 1711.05101) over all parameters. Weight decay acts on matrices, not on norms, biases and a
    head."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "head": None},
        {"params": vectors, "weight_decay": 0.0, "head": None},
    ]
    if head is not None:
        groups.append({"params": [*head.module.parameters()], "weight_decay": 0.0, "head": head.kind})
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
