"""What every engine does around a step: what a loss of a whole step wants to know before the gradient pass, mini-batches and
epochs, updates that are not finite, memory that runs out, and what a step reports.

The invariant: `prepare` is called once for an update and sees every trained token of it, in the order of the rows and of the
tokens in each, whatever computes them and however often memory ran out. Which rows an update is taken on depends on the
seed, the number of steps before and the rows alone, so a step that is taken again takes the same updates. An update that is
not finite is skipped, counted and said, a bounded number of times in a row; it leaves weights, moments and schedule as they
were, so the same rows on the same weights are skipped again when a run is resumed.

A shortage of memory is told from every other failure, wherever in torch or below it memory ran out; and where no smaller
micro-batch would help it becomes an `EngineError` that says what would.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightning.batch.sample import Sample, TokenSpan
from lightning.engines.microbatch import Tally
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.rows import Numbers, Tokens, is_trained, name
from lightning.errors import DataError, EngineError
from lightning.losses.protocol import (
    Loss,
    LossOutput,
    StepLoss,
    StepTokens,
    TokenBatch,
    check_updates,
    needs_reference,
)

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say when memory runs out outside torch's CUDA allocator: in the driver, in a library, on a CPU."""

MORE_ROOM = (
    "leave the engine more of the device (a lower policy_server.gpu_memory_utilization, where vLLM is on it), or begin a run "
    "that needs less: LoRA adapters (engine.lora), engine = verl on several GPUs, a smaller model"
)
"""What helps where weights, gradients and moments by themselves are too much."""
SMALLER_ROWS = "begin a new run with LoRA adapters (engine.lora) or shorter calls (policy_server.max_model_len)"
"""What helps where a single row is."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


@contextmanager
def needing_room(doing: str, cures: str = MORE_ROOM) -> Iterator[None]:
    """A shortage of memory inside the block becomes an `EngineError` that says what was being done and what helps."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise EngineError(f"out of memory while {doing}: {cures}") from error


CURES = "lower engine.lr or engine.max_grad_norm, or compute in float32 (engine.dtype)"


class NonFiniteError(EngineError):
    """An update cannot be taken: what is not finite, and where."""


logger = logging.getLogger(__name__)


def is_prepared(loss: Loss) -> bool:
    """Whether a loss wants to know something of a step's tokens before the gradient pass."""
    return isinstance(loss, StepLoss) or needs_reference(loss)


def prepared(
    loss: Loss,
    samples: Sequence[Sample],
    tokens: Tokens,
    current: Callable[[], Numbers],
    reference: Callable[[], Numbers],
) -> list[Sample]:
    """The rows with what the loss wants to know of their trained tokens (N,), which are in the order of the rows; `current` and
    `reference` read these tokens' logprobs, where they are wanted."""
    first = reference() if needs_reference(loss) else None
    numbers: Numbers | None = None
    if isinstance(loss, StepLoss) and len(tokens):
        numbers = _numbers_of(loss, samples, tokens, current(), first)
    return _with_numbers(samples, tokens, first, numbers)


class Computer(Protocol):
    """What a step driver needs of an engine: the numbers before a step, the gradient of some rows, and an update on it."""

    def prepare(self, samples: Sequence[Sample], loss: Loss) -> Sequence[Sample]:
        """The rows with what the loss wants to know of their tokens (`prepared`)."""

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int) -> Tally:
        """Add the gradient of these rows. Raises `NonFiniteError` where a loss is not finite; nothing of it is left then."""

    def update(self, lr: float, critic_lr: float, step: int) -> dict[str, float]:
        """Clip the gradient, update at these rates, and forget it; returns its norms as they were. Raises `NonFiniteError`
        where one is not finite; weights and moments are then as before."""


class StepDriver:
    """Takes the steps of an engine. `steps` is how many were taken, those that changed nothing not counted."""

    def __init__(self, max_nonfinite_steps: int) -> None:
        self._most_nonfinite, self._nonfinite = max_nonfinite_steps, 0
        """How many updates may be left out in a row, and how many were since the last one that was taken."""
        self._config, self._seed = OptimizerConfig(), 0
        self._pending: _Updates | None = None
        """What the gradient at hand is of, where it was made by `forward_backward`."""
        self.steps = 0

    def begin(self, config: OptimizerConfig, seed: int) -> None:
        """Start before the first step, with these settings."""
        self._config, self._seed, self.steps, self._pending = config, seed, 0, None

    def dropped(self) -> None:
        """The gradient at hand is gone."""
        self._pending = None

    def step(self, computer: Computer, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """A step on these rows: `epochs` passes, in each of which every one of `minibatches` parts gets an update at the rate
        `lr`. Without any weight there is none (`stepped` is 0); one that is not finite is left out (`skipped_nonfinite`).

        Raises `EngineError` when more than `max_nonfinite_steps` updates in a row are not finite.
        """
        config = self._config
        check_updates(loss, several=config.minibatches * config.epochs > 1, parts=config.minibatches > 1)
        self._pending = None
        trained, before = [sample for sample in samples if is_trained(sample)], self._nonfinite
        made = _Updates(self._config.lr if lr is None else lr)
        try:
            if trained:
                self._take(computer, trained, loss, made)
        except BaseException:
            self._nonfinite = before  # the step may be taken again, as when workers died of it
            raise
        self.steps += bool(made.taken)
        return made.result()

    def forward_backward(self, computer: Computer, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these rows, for an update by `optim_step`; returns what all rows since the last update were.
        Raises what `Computer.accumulate` raises; no gradient is left then."""
        made = self._pending or _Updates(0.0, parts_add_up=True)
        self._pending = None
        trained = [sample for sample in samples if is_trained(sample)]
        if trained:
            made.add(computer.accumulate(computer.prepare(trained, loss), loss, self.steps + 1), None, first=True)
        self._pending = made if made.parts else None
        return made.result()

    def optim_step(self, computer: Computer, lr: float | None = None) -> StepResult:
        """Update on the gradient at hand, at this rate. Raises `EngineError` without a gradient."""
        if self._pending is None:
            raise EngineError("there is no gradient to update on: call forward_backward() with trained rows first")
        self._pending = None
        made = _Updates(self._config.lr if lr is None else lr)
        made.add(Tally(), computer.update(*self._rates(made), self.steps + 1), first=True)
        self.steps += 1
        return made.result()

    def _rates(self, made: _Updates) -> tuple[float, float]:
        """The policy's and the critic's."""
        return made.lr, made.lr * self._config.critic_lr / self._config.lr

    def _take(self, computer: Computer, trained: Sequence[Sample], loss: Loss, made: _Updates) -> None:
        if self._config.minibatches * self._config.epochs > 1:
            trained = _begun(computer, trained)
        for epoch in range(self._config.epochs):
            for part in minibatches(trained, self._config.minibatches, (self._seed, self.steps, epoch)):
                self._update(computer, part, loss, made, first=epoch == 0)
            made.passed()

    def _update(self, computer: Computer, part: Sequence[Sample], loss: Loss, made: _Updates, *, first: bool) -> None:
        tally = Tally()
        try:
            tally = computer.accumulate(computer.prepare(part, loss), loss, self.steps + 1)
            norms = computer.update(*self._rates(made), self.steps + 1) if tally.parts else None
        except NonFiniteError as error:
            made.skip(tally, first=first)
            self._skipped(error)
            return
        made.add(tally, norms, first=first)
        if norms is not None:
            self._nonfinite = 0

    def _skipped(self, error: NonFiniteError) -> None:
        """An update was left out. Raises `EngineError` where it is one too many in a row."""
        self._nonfinite += 1
        if self._nonfinite > self._most_nonfinite:
            raise EngineError(
                f"{error}, so this update was not taken. It is the {_ordinal(self._nonfinite)} in a row, "
                f"more than engine.max_nonfinite_steps = {self._most_nonfinite}: resume the run with other settings ({CURES}), "
                "or go on from an earlier checkpoint if the weights themselves are no longer finite"
            ) from error
        logger.warning(
            "%s: the step is skipped, and weights and optimizer are as before (%d in a row; engine.max_nonfinite_steps = %d). "
            "If it happens again: %s",
            error,
            self._nonfinite,
            self._most_nonfinite,
            CURES,
        )


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class _Present:
    """Asks for the current logprobs, as a loss that prepares may."""

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        return step.logprobs

    def __call__(self, batch: TokenBatch) -> LossOutput:
        raise NotImplementedError("this is no loss")


def _begun(computer: Computer, samples: Sequence[Sample]) -> Sequence[Sample]:
    """The rows with the policy's own logprobs before the first update, where the sampler gave none for some trained token: to
    these the ratio of later updates is, which nothing would bound otherwise."""
    if not any(np.isnan(sample.logprobs[sample.weights != 0]).any() for sample in samples):
        return samples
    try:
        found = computer.prepare(samples, _Present())
    except NonFiniteError:
        return samples  # each update says it, and is counted
    return [replace(sample, begun=sample.prepared, prepared=None) for sample in found]


def minibatches(samples: Sequence[Sample], count: int, seed: tuple[int, ...]) -> list[list[Sample]]:
    """The rows in at most `count` parts, dealt by the seed; in a part they keep their order, so shared prefixes stay together.

    Each part's weights are scaled to the sum that all rows have, and so are those of its states: an update on a part is a mean
    over it as one on all rows is a mean over all. The expected gradient of a part is then that of all rows where parts weigh
    alike.
    """
    if count == 1 or len(samples) == 1:
        return [[*samples]]
    order = np.random.default_rng(seed).permutation(len(samples))
    parts = [sorted(part.tolist()) for part in np.array_split(order, min(count, len(samples)))]
    whole, states = _sums(samples)
    found = []
    for places in parts:
        part = [samples[place] for place in places]
        own, own_states = _sums(part)
        scales = (whole / own if own else 1.0, states / own_states if own_states else 1.0)
        found.append([_scaled(sample, *scales) for sample in part])
    return found


def _sums(samples: Sequence[Sample]) -> tuple[float, float]:
    """All weights of tokens, and of states."""
    tokens = sum(float(np.abs(sample.weights).sum(dtype=np.float64)) for sample in samples)
    return tokens, sum(abs(span.value_weight) for sample in samples for span in sample.spans)


def _scaled(sample: Sample, tokens: float, states: float) -> Sample:
    spans = tuple(replace(span, value_weight=span.value_weight * states) for span in sample.spans)
    return replace(sample, weights=(sample.weights * tokens).astype(sample.weights.dtype), spans=spans)


class _Updates:
    """What a step reports, added up over its updates. The losses of parts add up to that of all rows (`parts_add_up`), or each
    is a mean as that is."""

    def __init__(self, lr: float, *, parts_add_up: bool = False) -> None:
        self.lr, self._add_up = lr, parts_add_up
        self._first: Tally | None = None
        self._tally = Tally()
        self._norms: list[dict[str, float]] = []
        self._clipped, self._last = list[float](), dict[str, float]()
        self.parts = self.taken = self._skipped = 0

    def add(self, tally: Tally, norms: dict[str, float] | None, *, first: bool) -> None:
        """An update that was taken, or whose rows had no weight (`norms` None)."""
        self._count(tally, first=first)
        if norms is not None:
            self._norms.append(norms)
            self.taken += 1

    def skip(self, tally: Tally, *, first: bool) -> None:
        """One that was not; `tally` is of what had been computed, if all rows were."""
        self._count(tally, first=first)
        self._skipped += 1

    def passed(self) -> None:
        """A pass over the rows has ended."""
        self._last = {"clip_fraction_last": float(np.mean(self._clipped))} if self._clipped else {}
        self._clipped = []

    def _count(self, tally: Tally, *, first: bool) -> None:
        if not tally.parts:
            return
        if (clipped := tally.metrics().get("clip_fraction")) is not None:
            self._clipped.append(clipped)
        if first:
            self._first = self._first or tally
            merged = Tally()
            merged.merge(self._tally)
            merged.merge(tally)
            self._tally, self.parts = merged, self.parts + 1

    def result(self) -> StepResult:
        """The metrics are those of the first pass; how far trainer and sampler are apart is known before the first update. Of
        what is not finite, and of updates where none was taken, nothing is known."""
        found = self._tally.metrics()
        if not self._add_up:
            before = (self._first or Tally()).metrics()
            found = {name: value for name, value in found.items() if "logprob_gap" not in name}
            found |= {name: value for name, value in before.items() if "logprob_gap" in name}
            found |= {"loss": found["loss"] / self.parts} if self.parts else {}
        found |= self._last
        if self._skipped:
            found = {name: value for name, value in found.items() if math.isfinite(value)}
        names = self._norms[0] if self._norms else ()
        norms = {name: float(np.mean([one[name] for one in self._norms])) for name in names}
        rate = {"lr": self.lr} if self.taken else {}
        counts = {
            "updates": float(self.taken),
            "stepped": float(self.taken > 0),
            "skipped_nonfinite": float(self._skipped),
        }
        return StepResult(found | norms | counts | rate, self._tally.seen)


def _numbers_of(
    loss: StepLoss, samples: Sequence[Sample], tokens: Tokens, logprobs: Numbers, reference: Numbers | None
) -> Numbers:
    """What a loss says of each trained token (N,), in the order of the rows; `tokens`, `logprobs` and `reference` are so.

    Raises `EngineError`, naming the loss, when that is not one number for each, and `NonFiniteError` when one is not finite.
    """
    missing, began = np.isnan(tokens.sampled), logprobs if tokens.begun is None else tokens.begun
    calls, spans = _calls_of(samples, tokens)
    step = StepTokens(
        logprobs=logprobs,
        old_logprobs=np.where(missing, began, tokens.sampled).astype(logprobs.dtype, copy=False),
        advantages=tokens.advantages,
        weights=tokens.weights,
        versions=tokens.versions,
        reference=reference,
        calls=calls,
        spans=spans,
    )
    found = np.asarray(loss.prepare(step))
    if found.shape != (len(tokens),):
        raise EngineError(
            f"{_named(loss)}.prepare gave an array of shape {found.shape} for {len(tokens)} tokens: it must give one number "
            "for each"
        )
    if not np.isfinite(found).all():
        first = int(np.flatnonzero(~np.isfinite(found))[0])
        span = spans[calls[first]]
        raise NonFiniteError(
            f"{_named(loss)}.prepare gave {found[first]} for token {tokens.columns[first] - span.start} of rollout "
            f"{span.rollout} attempt {span.attempt} call {span.seq} (and {int((~np.isfinite(found)).sum()) - 1} more)"
        )
    return found.astype(logprobs.dtype, copy=False)


def _with_numbers(
    samples: Sequence[Sample], tokens: Tokens, reference: Numbers | None, prepared: Numbers | None
) -> list[Sample]:
    """The rows with what is known of their trained tokens (N,), in the order of the rows; NaN stands for all others."""
    starts = np.searchsorted(tokens.rows, np.arange(len(samples) + 1)).tolist()

    def spread(numbers: Numbers | None, row: int) -> Numbers | None:
        if numbers is None:
            return None
        own = slice(starts[row], starts[row + 1])
        values = np.full(len(samples[row]), np.nan, numbers.dtype)
        values[tokens.columns[own]] = numbers[own]
        return values

    return [
        replace(sample, reference=spread(reference, row), prepared=spread(prepared, row))
        for row, sample in enumerate(samples)
    ]


def _calls_of(samples: Sequence[Sample], tokens: Tokens) -> tuple[npt.NDArray[np.int64], tuple[TokenSpan, ...]]:
    """For each token which of the rows' spans it lies in, and these."""
    starts = np.searchsorted(tokens.rows, np.arange(len(samples) + 1)).tolist()
    calls = np.full(len(tokens), -1, np.int64)
    spans: list[TokenSpan] = []
    for row, sample in enumerate(samples):
        own = slice(starts[row], starts[row + 1])
        for span in sample.spans:
            first, last = (starts[row] + np.searchsorted(tokens.columns[own], (span.start, span.stop))).tolist()
            calls[first:last] = len(spans)
            spans.append(span)
        if (calls[own] < 0).any():
            raise DataError(
                f"the training row of {name(sample)} has a weight on a token that belongs to none of its calls"
            )
    return calls, tuple(spans)


def _named(loss: StepLoss) -> str:
    own: object = getattr(loss, "preparer", loss)
    return getattr(own, "__qualname__", type(own).__qualname__)
