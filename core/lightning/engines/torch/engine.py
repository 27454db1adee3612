"""The torch engine: one process, a CPU or one CUDA device, any `transformers` causal LM, full weights or LoRA.

The invariant: the gradient of an update is the exact sum of its rows' gradients, whatever the micro-batches; and an update is
taken wholly or, when its loss or gradient is not finite, not at all.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import nn

from lightning.batch.sample import FloatArray, Sample
from lightning.engines import rows
from lightning.engines.critic import Trunk, ValueHead, no_critic, refuse_targets
from lightning.engines.export import whole_weights, write_adapters, write_file, write_folder
from lightning.engines.loading import read_model
from lightning.engines.microbatch import Tally
from lightning.engines.model_contents import contents
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.rows import (
    Numbers,
    States,
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
    NonFiniteError,
    StepDriver,
    is_prepared,
    needing_room,
    prepared,
)
from lightning.engines.torch.layouts import Forest, GradientPass, Layout, Linear, read_logprobs, read_values
from lightning.engines.torch.model import CausalLM, Reference, load_model, resolve_device
from lightning.engines.torch.state import Progress, load_state, save_state
from lightning.engines.torch.tree import why_no_tree
from lightning.errors import EngineError
from lightning.losses.protocol import Loss
from lightning.types import Json

if TYPE_CHECKING:
    from lightning.config import LoraConfig
    from lightning.config.sections import StepKind

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TorchEngine:
    """Implements `lightning.engines.protocol.Engine`. Arguments are those of `EngineConfig`; `dtype` may also be `float64`, and
    `max_model_len` is the policy server's (`engines.loading`)."""

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
        critic_trunk: Trunk = "frozen",
        max_nonfinite_steps: int = 3,
    ) -> None:
        self._dtype, self._device_name, self._threads, self._kind = dtype, device, threads, step
        self._budget, self._gradient_checkpointing, self._lora = tokens_per_microbatch, gradient_checkpointing, lora
        self._trunk: Trunk = critic_trunk
        self._served = max_model_len
        self._lm: CausalLM | None = None
        self._reference: Reference | None = None
        self._critic: ValueHead | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._config = OptimizerConfig()
        self._parameters: dict[str, nn.Parameter] = {}
        self._no_tree: str | None = None
        self._driver = StepDriver(max_nonfinite_steps)
        self._known: Layout | None = None
        """That of the rows that were prepared last, which are probably those of the next gradient."""
        self._summed: list[tuple[Layout, Loss]] = []
        """What the gradient at hand is of."""

    def check(self, model: Path) -> str:
        """See `lightning.engines.protocol.ChecksModel`."""
        return contents(model, lora=self._lora, max_model_len=self._served).remark()

    def check_teacher(self, teacher: Path) -> None:
        """See `lightning.engines.protocol.ChecksTeacher`."""
        read_model(teacher, device_map="meta")

    def open(
        self, model: Path, optimizer: OptimizerConfig, *, seed: int, critic: bool = False, reference: Path | None = None
    ) -> None:
        """Load a model folder and make a fresh optimizer. Sets torch's CPU threads and random seed for the process."""
        device = resolve_device(self._device_name)
        if device.type == "cpu":
            self._threads = self._threads or torch.get_num_threads()
            torch.set_num_threads(self._threads)
        torch.manual_seed(seed)
        with needing_room(f"loading {model} onto {device}"):
            self._lm = load_model(
                model,
                dtype=self._dtype,
                device=device,
                lora=self._lora,
                gradient_checkpointing=self._gradient_checkpointing,
                max_model_len=self._served,
            )
        self._reference = Reference(self._lm, lora=self._lora is not None, folder=reference, max_model_len=self._served)
        self._critic = ValueHead(self._lm.model, self._trunk, dtype=self._lm.dtype, device=device) if critic else None
        self._parameters = self._lm.trainable()
        self._optimizer = _adamw(self._parameters, self._critic, optimizer)
        self._config, self._no_tree = optimizer, None
        self._driver.begin(optimizer, seed)
        self._forget()

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Current policy's logprobs at each sample's temperature, shape (T,) each; index 0 is NaN."""
        self._checked(samples)
        lengths = [len(sample) for sample in samples]
        tokens = wanted_tokens(samples, [np.arange(1, length) for length in lengths])
        layout = Linear(samples, lengths, tokens, states_of((), every=True))
        found = self._read(layout, reference=False).astype(np.float32)
        return [np.append(np.float32(np.nan), own) for own in _apart(found, [length - 1 for length in lengths])]

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The critic's value of the state before each span, shape (spans,) each."""
        lm, critic = self._checked(samples), self._critic
        if critic is None:
            raise no_critic()
        lengths = [max((span.start for span in sample.spans), default=0) + 1 for sample in samples]
        layout = self._layout(samples, lengths, wanted_tokens((), ()), states_of(samples, every=True))
        found = self._within_memory(layout, lambda: read_values(layout, lm, critic, self._budget)).astype(np.float32)
        return _apart(found, [len(sample.spans) for sample in samples])

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """A step on the sum of the rows' losses, as `StepDriver` takes it.

        Only the engine knows the vocabulary, so the engine refuses ids outside it. vLLM cannot have served one: it samples
        from the model's own vocabulary, and its model has no embedding for more. So such a row is another model's.

        Raises `DataError` for a row that cannot be computed on and `EngineError` when more than `max_nonfinite_steps` updates
        in a row are not finite.
        """
        self._check_trainable(samples)
        try:
            self._forget()
            return self._driver.step(self, samples, loss, lr)
        finally:
            self._forget()
            torch.cuda.empty_cache()  # vLLM may be on the same GPU, and wants its memory back; nothing happens without one

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """See `lightning.engines.protocol.Engine`."""
        self._check_trainable(samples)
        try:
            return self._driver.forward_backward(self, samples, loss)
        except BaseException:
            self._forget()
            raise
        finally:
            torch.cuda.empty_cache()

    def optim_step(self, lr: float | None = None) -> StepResult:
        """See `lightning.engines.protocol.Engine`."""
        self._opened()
        try:
            return self._driver.optim_step(self, lr)
        finally:
            torch.cuda.empty_cache()

    def prepare(self, samples: Sequence[Sample], loss: Loss) -> Sequence[Sample]:
        """See `lightning.engines.step.Computer`."""
        if not is_prepared(loss):
            return samples
        layout = self._step_layout(samples)
        tokens = reordered(layout.tokens, row_order(layout.tokens))
        current, reference = (partial(self._read, layout, reference=which) for which in (False, True))
        found = prepared(loss, samples, tokens, current, reference)
        self._known = layout.again(found)
        return found

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int) -> Tally:
        """See `lightning.engines.step.Computer`. When memory runs out, all that the gradient is of is computed again."""
        lm, known, self._known = self._opened(), self._known, None
        if self._kind == "per-call":
            samples, known = [row for sample in samples for row in rows.by_call(sample)], None
        layout = known if known is not None and _are(known.samples, samples) else self._step_layout(samples)
        added = [(layout, loss)]  # to what is there; after a shortage of memory, all of it again

        def attempt() -> Tally:
            nonlocal added
            todo, added = added, [*self._summed, (layout, loss)]
            if len(todo) == len(added):
                self._opened_optimizer().zero_grad(set_to_none=True)
            return [GradientPass(lm, each, own, self._critic, step).run(self._budget) for each, own in todo][-1]

        try:
            tally = self._within_memory(layout, attempt)
        except BaseException:
            self._forget()
            raise
        self._summed.append((layout, loss))
        return tally

    def update(self, lr: float, critic_lr: float, step: int) -> dict[str, float]:
        """See `lightning.engines.step.Computer`."""
        optimizer = self._opened_optimizer()
        try:
            norms = self._clipped(step)
            for group in optimizer.param_groups:
                group["lr"] = critic_lr if group["critic"] else lr
            cures = f"it may have been taken in part, so resume the run; {MORE_ROOM}"
            with needing_room(f"taking step {step}", cures):
                optimizer.step()  # the first one makes the moments
        finally:
            self._forget()
        return norms

    def _forget(self) -> None:
        """No gradient is left."""
        self._driver.dropped()
        self._summed, self._known = [], None
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        """Write the whole training state to a folder, atomically; one that exists is replaced."""
        lm, optimizer = self._opened(), self._opened_optimizer()
        progress = Progress(self._driver.steps, self._budget, self._config, self._critic.trunk if self._critic else "")
        save_state(folder, self._learning(), optimizer, progress, lm.device)

    def load(self, folder: Path) -> None:
        """Restore a saved state into the opened model; the optimizer's settings stay those given to `open`.

        The next step is then bit for bit the one that would have followed on a CPU; on CUDA the attention kernels' own
        order of summation may differ between any two runs. For that the micro-batch size comes back too, as small as a
        shortage of memory had made it, unless `tokens_per_microbatch` is smaller now: sums are then rounded otherwise. The
        reference model is not part of it.
        """
        lm, optimizer = self._opened(), self._opened_optimizer()
        critic = self._critic.trunk if self._critic else ""
        with needing_room(f"loading the training state in {folder}"):
            progress = load_state(folder, self._learning(), optimizer, lm.device, critic=critic)
        saved = progress.tokens_per_microbatch
        if saved < self._budget:
            logger.warning("going on with the %d tokens per micro-batch that the training state was saved with", saved)
        self._driver.steps, self._budget = progress.steps, min(saved, self._budget)
        self._forget()

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load, LoRA merged; return it."""
        lm = self._opened()
        return write_folder(lm.folder, self._whole(), lm.dtype, folder)

    def weights(self, file: Path) -> Path:
        """Write the current full weights as one safetensors file, LoRA merged; return it."""
        lm = self._opened()
        return write_file(lm.folder, self._whole(), lm.dtype, file)

    def adapters(self, file: Path) -> Path | None:
        """Write the adapters alone; None where all weights are trained, or where the folder stores a layer in another form."""
        lm = self._opened()
        return write_adapters(lm.folder, lm.model, lm.dtype, file) if self._lora is not None else None

    def numerics(self) -> dict[str, Json]:
        """In what it computes (`trainer.context.Numeric`)."""
        lm = self._opened()
        return {
            "dtype": str(lm.dtype).removeprefix("torch."),
            "device": lm.device.type if lm.device.type == "cpu" else torch.cuda.get_device_name(lm.device),
            "threads": self._threads or torch.get_num_threads(),
            "tokens_per_microbatch": self._budget,
        }

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self._lm, self._reference, self._critic, self._optimizer, self._parameters = None, None, None, None, {}
        gc.collect()  # a model's modules know each other, and Python would look for such circles after gigabytes more
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _whole(self) -> dict[str, torch.Tensor]:
        lm = self._opened()
        with needing_room("gathering the weights"):
            return whole_weights(lm.model, lm.dtype)

    def _opened(self) -> CausalLM:
        if self._lm is None:
            raise EngineError("the engine has no model: call open() first")
        return self._lm

    def _opened_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineError("the engine has no model: call open() first")
        return self._optimizer

    def _checked(self, samples: Sequence[Sample]) -> CausalLM:
        """The model, if these rows can be computed on, by the engine's number of threads. Raises `DataError` otherwise."""
        lm = self._opened()
        if lm.device.type == "cpu" and self._threads:
            torch.set_num_threads(self._threads)  # torch keeps it by thread, and any thread may ask
        for sample in samples:
            rows.check(sample, lm.vocab_size)
        return lm

    def _check_trainable(self, samples: Sequence[Sample]) -> None:
        self._checked(samples)
        if self._critic is None:
            refuse_targets(samples)

    def _learning(self) -> dict[str, nn.Parameter]:
        """All that the optimizer changes: the policy's parameters and the critic's."""
        return self._parameters | (self._critic.parameters() if self._critic else {})

    def _read(self, layout: Layout, *, reference: bool) -> Numbers:
        """Logprobs (N,) of a layout's tokens in the order of the rows, by the reference model or by the one that is trained."""
        lm, source = self._opened(), self._reference
        with source.model() if reference and source is not None else nullcontext(lm) as model:
            if reference and source is not None and isinstance(layout, Forest):
                if source.takes_trees is None:
                    source.takes_trees = not why_no_tree(model)
                layout = layout if source.takes_trees else layout.by_rows()
            return self._within_memory(layout, lambda: read_logprobs(layout, model, self._budget))

    def _step_layout(self, samples: Sequence[Sample]) -> Layout:
        lengths = [rows.trained_length(sample) for sample in samples]
        return self._layout(samples, lengths, trained_tokens(samples), states_of(samples, every=False))

    def _layout(self, samples: Sequence[Sample], lengths: Sequence[int], tokens: Tokens, states: States) -> Layout:
        """How rows are computed; `auto` takes the tree where enough tokens are shared to pay for the smaller pieces."""
        if self._kind in ("auto", "tree") and samples:
            forest = Forest.of(samples, lengths, tokens, states)
            if (self._kind == "tree" or forest.pays) and self._takes(forest):
                return forest
        return Linear(samples, lengths, tokens, states)

    def _takes(self, forest: Forest) -> bool:
        """Whether the model can be computed over a tree; that it cannot is said once, with what it costs."""
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
        """Clip the policy's gradient and the critic's, each by its own norm; returns these as they were.

        Raises `NonFiniteError` when one is not finite.
        """
        norms = {"grad_norm": float(nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm))}
        if self._critic is not None:
            own = self._critic.parameters().values()
            norms["critic_grad_norm"] = float(nn.utils.clip_grad_norm_(own, self._config.max_grad_norm))
        if not all(map(math.isfinite, norms.values())):
            largest = _largest([sample for layout, _ in self._summed for sample in layout.samples])
            raise NonFiniteError(f"the gradient is not finite at step {step} (the largest advantage is {largest})")
        return norms

    def _within_memory(self, layout: Layout, attempt: Callable[[], T]) -> T:
        """What `attempt` returns. When memory runs out it is made again with half the micro-batch, which is kept."""
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
    """Numbers of all rows as one array for each."""
    return np.split(values, np.cumsum(counts)[:-1]) if counts else []


def _are(some: Sequence[Sample], others: Sequence[Sample]) -> bool:
    """Whether these are the same rows."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _largest(samples: Sequence[Sample]) -> str:
    """The trained advantage of a step that is furthest from 0, and whose it is, for messages."""
    trained = [(np.abs(sample.advantages[sample.weights != 0]).max(initial=0.0), sample) for sample in samples]
    size, sample = max(trained, key=lambda item: item[0])
    return f"{size:g}, in {rows.name(sample)}"


def _adamw(
    parameters: dict[str, nn.Parameter], critic: ValueHead | None, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101); matrices decay, norms, biases and the critic do not."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "critic": False},
        {"params": vectors, "weight_decay": 0.0, "critic": False},
    ]
    if critic is not None:
        groups.append({"params": [*critic.parameters().values()], "weight_decay": 0.0, "critic": True})
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
