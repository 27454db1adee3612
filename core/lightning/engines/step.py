"""The part of a step that all engines share: preparing a loss, mini-batches and epochs, skipping updates that are not finite,
the checks of a head, errors for a lack of memory, and the step's report.

The invariant: a loss's `prepare` is called once for an update with every trained token of it, in the order of the rows and of
the tokens in each, whichever engine computes them and however often memory ran out. The rows of an update depend on the seed,
the number of steps before and the step's rows alone, so a repeated step takes the same updates. An update that is not finite is
skipped, counted and logged, a bounded number of times in a row; weights, moments and schedule stay as they were, so a resumed
run skips the same rows on the same weights again.

A lack of memory is distinguished from other failures, wherever in torch or below it occurs. If smaller micro-batches would not
help, it becomes an `EngineError` that says what would.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning.batch.sample import Sample, TokenSpan
from lightning.engines.protocol import ChecksLoss, Engine, Head, OptimizerConfig, StepResult
from lightning.engines.rows import Numbers, Read, Tally, Tokens, is_trained, name, unknown
from lightning.errors import ConfigError, DataError, EngineError
from lightning.losses.protocol import (
    Loss,
    LossOutput,
    StepLoss,
    StepTokens,
    TokenBatch,
    check_updates,
    needs_reference,
    needs_top_logprobs,
    over_all_tokens,
    prepared_by,
    users_name_of,
)

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Parts of error messages when memory runs out outside of torch's CUDA allocator: in the driver, in a library, on a CPU."""

MORE_ROOM = (
    "leave the engine more of the device (a lower policy_server.gpu_memory_utilization, where vLLM is on it), or begin a run "
    "that needs less: LoRA adapters (engine.lora), engine = verl on several GPUs, a smaller model"
)
"""The cure if weights, gradients and moments alone need too much memory."""
SMALLER_ROWS = "begin a new run with LoRA adapters (engine.lora) or shorter calls (policy_server.max_model_len)"
"""The cure if a single row needs too much memory."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


@contextmanager
def needing_room(doing: str, cures: str = MORE_ROOM) -> Iterator[None]:
    """Turn an error for lack of memory inside the block into an `EngineError` that names the interrupted work (`doing`) and the
    `cures`."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise EngineError(f"out of memory while {doing}: {cures}") from error


CURES = "lower engine.lr or engine.max_grad_norm, or compute in float32 (engine.dtype)"


class NonFiniteError(EngineError):
    """An update cannot be taken because a number is not finite; the message says which number, and where it is."""


logger = logging.getLogger(__name__)


def check_loss(engine: Engine, model: Path, loss: Loss) -> None:
    """Raise `ConfigError`, naming the loss and the cure, if the engine cannot give it the most probable tokens that it wants
    when this model folder is trained (`ChecksLoss`)."""
    if not (wanted := needs_top_logprobs(loss)):
        return
    if not isinstance(engine, ChecksLoss):
        raise ConfigError(
            f"the loss {users_name_of(loss)} has needs_top_logprobs = {wanted}, and the engine {type(engine).__name__} gives "
            "no logprobs of most probable tokens: take engine = torch, or another loss"
        )
    engine.check_loss(model, loss)


def is_prepared(loss: Loss) -> bool:
    """Whether a loss needs numbers of an update's tokens before the gradient pass: the results of its own `prepare`, or
    reference logprobs."""
    return isinstance(loss, StepLoss) or needs_reference(loss)


def prepared(
    loss: Loss,
    samples: Sequence[Sample],
    tokens: Tokens,
    current: Callable[[], Read],
    reference: Callable[[], Numbers],
) -> list[Sample]:
    """Return the rows with the numbers that the loss needs for each trained token. `tokens` are the N trained tokens of all
    rows, in the order of the rows. `current` computes the logprobs (N,) of these tokens under the present policy, and if the
    engine can its entropies and most probable tokens; `reference` the logprobs under the reference model. Each of the two is
    called only if the loss needs its logprobs."""
    first = reference() if needs_reference(loss) else None
    numbers: Numbers | None = None
    if isinstance(loss, StepLoss) and len(tokens):
        numbers = _numbers_of(loss, samples, tokens, current(), first)
    return _with_numbers(samples, tokens, first, numbers)


@dataclass(frozen=True, slots=True)
class MadeHead:
    """A head with the module that was made of it, for the model that an engine has open."""

    kind: Head
    module: nn.Module

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the head's parameters by their names in a training state."""
        return dict(self.module.named_parameters(self.kind.name))


def no_head() -> EngineError:
    """Return the error for a call that asks an engine without a head for values."""
    return EngineError(
        "the engine has no head: open it with head=..., as the trainer does for an algorithm that names its `head`"
    )


def refuse_targets(samples: Sequence[Sample]) -> None:
    """Raise `EngineError`, in an engine without a head, if rows hold value targets."""
    if any(span.value_weight for sample in samples for span in sample.spans):
        raise EngineError(
            "the rows hold value targets, but the engine has no head to learn them: open it with head=..., or let the "
            "algorithm name its `head`"
        )


def same_head(folder: Path, saved: str, opened: str) -> None:
    """Raise `EngineError` if a training state in `folder` was saved with another head than the engine was opened with. `saved`
    and `opened` are heads as text, or empty for no head."""
    if saved != opened:
        raise EngineError(
            f"the training state in {folder} was saved {_with(saved)}, but this engine was opened {_with(opened)}: "
            "resume with the algorithm and the settings of the head that the run was started with"
        )


def _with(head: str) -> str:
    return f"with a {head}" if head else "without a head"


class Computer(Protocol):
    """The operations of an engine that a step driver calls: preparing rows, computing their gradient, and updating the
    weights."""

    def prepare(self, samples: Sequence[Sample], loss: Loss) -> Sequence[Sample]:
        """Return the rows with the numbers that the loss needs of their tokens before the gradient pass (`prepared`)."""

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int) -> Tally:
        """Add the gradient of these rows to the accumulated gradient. If a loss is not finite, discard the whole gradient and
        raise `NonFiniteError`."""

    def update(self, lr: float, step: int) -> dict[str, float]:
        """Clip the gradient, update at the learning rate `lr` (a head at its own, scaled in proportion), discard the gradient,
        and return its norms before clipping. Raises `NonFiniteError` if a norm is not finite; weights and moments are then as
        before."""


class StepDriver:
    """The object that takes an engine's steps. `steps` is the number of steps so far that changed the weights."""

    def __init__(self, max_nonfinite_steps: int) -> None:
        self._most_nonfinite, self._nonfinite = max_nonfinite_steps, 0
        """How many updates may be skipped in a row, and how many were skipped since the last update that was taken."""
        self._config, self._seed = OptimizerConfig(), 0
        self._pending: _Updates | None = None
        """The report so far of the accumulated gradient, if `forward_backward` made it; else None."""
        self.steps = 0

    def begin(self, config: OptimizerConfig, seed: int) -> None:
        """Start before the first step, with these settings."""
        self._config, self._seed, self.steps, self._pending = config, seed, 0, None

    def dropped(self) -> None:
        """Note that the accumulated gradient was discarded, so that `optim_step` refuses."""
        self._pending = None

    def step(self, computer: Computer, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step on these rows: `epochs` passes, each with an update for every one of `minibatches` parts, at the learning
        rate `lr` (None: the optimizer's). Rows without any weight give no update (`stepped` is 0), and an update that is not
        finite is skipped (`skipped_nonfinite`).

        Raises `EngineError` when more than `max_nonfinite_steps` updates in a row are not finite.
        """
        config = self._config
        check_updates(loss, several=config.minibatches * config.epochs > 1, parts=config.minibatches > 1)
        self._pending = None
        trained, before = _trained(samples, loss), self._nonfinite
        made = _Updates(self._config.lr if lr is None else lr)
        try:
            if trained:
                self._take(computer, trained, loss, made)
        except BaseException:
            self._nonfinite = before  # the step may be repeated, for example after workers died
            raise
        self.steps += bool(made.taken)
        return made.result()

    def forward_backward(self, computer: Computer, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these rows, for an update by `optim_step`, and return the report of all rows since the last
        update. Raises the errors of `Computer.accumulate`; then no gradient is left."""
        made = self._pending or _Updates(0.0, parts_add_up=True)
        self._pending = None
        trained = _trained(samples, loss)
        if trained:
            made.add(computer.accumulate(computer.prepare(trained, loss), loss, self.steps + 1), None, first=True)
        self._pending = made if made.parts else None
        return made.result()

    def optim_step(self, computer: Computer, lr: float | None = None) -> StepResult:
        """Update the weights on the accumulated gradient at the rate `lr` (None: the optimizer's). Raises `EngineError` without
        a gradient."""
        if self._pending is None:
            raise EngineError("there is no gradient to update on: call forward_backward() with trained rows first")
        self._pending = None
        made = _Updates(self._config.lr if lr is None else lr)
        made.add(Tally(), computer.update(made.lr, self.steps + 1), first=True)
        self.steps += 1
        return made.result()

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
            norms = computer.update(made.lr, self.steps + 1) if tally.parts else None
        except NonFiniteError as error:
            made.skip(tally, first=first)
            self._skipped(error)
            return
        made.add(tally, norms, first=first)
        if norms is not None:
            self._nonfinite = 0

    def _skipped(self, error: NonFiniteError) -> None:
        """Count and log a skipped update. Raises `EngineError` if too many in a row were skipped."""
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


def _trained(samples: Sequence[Sample], loss: Loss) -> list[Sample]:
    """Return the rows with a share of the loss, marked if that is over all tokens."""
    over_all = over_all_tokens(loss)
    return [replace(row, over_all=over_all) if over_all else row for row in samples if is_trained(row)]


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class _Present:
    """Not a real loss: its `prepare` returns the current logprobs, so that an engine's `prepare` computes them."""

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        return step.logprobs

    def __call__(self, batch: TokenBatch) -> LossOutput:
        raise NotImplementedError("this is no loss")


def _begun(computer: Computer, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the rows with the policy's own logprobs before the first update (`Sample.begun`), if some trained token has no
    old one by the sampler. The ratio of later updates is taken against these logprobs; without them nothing would bound the
    ratio."""
    if not any(unknown(sample)[sample.weights != 0].any() for sample in samples):
        return samples
    try:
        found = computer.prepare(samples, _Present())
    except NonFiniteError:
        return samples  # each update reports and counts this itself
    return [replace(sample, begun=sample.prepared, prepared=None) for sample in found]


def minibatches(samples: Sequence[Sample], count: int, seed: tuple[int, ...]) -> list[list[Sample]]:
    """Return the rows in at most `count` parts, dealt out at random by the seed. A part keeps the rows' order, so that rows
    with a common prefix stay together.

    The weights of each part's tokens, and those of its states, are scaled to the sum over all rows. So an update on a part is a
    mean over the part, as an update on all rows is a mean over all. If the parts' weights have equal sums, a part's expected
    gradient is that of all rows.
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
    """Return the sums of the absolute weights of all tokens, and of all states."""
    tokens = sum(float(np.abs(sample.weights).sum(dtype=np.float64)) for sample in samples)
    return tokens, sum(abs(span.value_weight) for sample in samples for span in sample.spans)


def _scaled(sample: Sample, tokens: float, states: float) -> Sample:
    spans = tuple(replace(span, value_weight=span.value_weight * states) for span in sample.spans)
    return replace(sample, weights=(sample.weights * tokens).astype(sample.weights.dtype), spans=spans)


class _Updates:
    """The report of a step, added up over its updates at the rate `lr`. With `parts_add_up` the losses of the parts add up to
    that of all rows; otherwise each is a mean, and so their mean is reported."""

    def __init__(self, lr: float, *, parts_add_up: bool = False) -> None:
        self.lr, self._add_up = lr, parts_add_up
        self._first: Tally | None = None
        self._tally = Tally()
        self._norms: list[dict[str, float]] = []
        self._clipped, self._last = list[float](), dict[str, float]()
        self.parts = self.taken = self._skipped = 0

    def add(self, tally: Tally, norms: dict[str, float] | None, *, first: bool) -> None:
        """Add an update: one that was taken, with its gradient's `norms`, or one whose rows had no weight (`norms` is None).
        `first` says whether the update belongs to the first pass over the rows."""
        self._count(tally, first=first)
        if norms is not None:
            self._norms.append(norms)
            self.taken += 1

    def skip(self, tally: Tally, *, first: bool) -> None:
        """Add an update that was skipped; `tally` is empty unless the gradient of all its rows was computed."""
        self._count(tally, first=first)
        self._skipped += 1

    def passed(self) -> None:
        """End a pass over the rows: note the mean `clip_fraction` of its updates."""
        self._last = {"clip_fraction_last": float(np.mean(self._clipped))} if self._clipped else {}
        self._clipped = []

    def _count(self, tally: Tally, *, first: bool) -> None:
        if not tally.parts:
            return
        if (clipped := tally.metrics().get("clip_fraction")) is not None:
            self._clipped.append(clipped)
        if first:
            self._first = self._first or tally
            self._tally.merge(tally)
            self.parts += 1

    def result(self) -> StepResult:
        """Return the step's report: the metrics of the first pass, and the gaps of trainer and sampler before the first update.
        If an update was skipped, metrics that are not finite are left out; norms and rate are absent if no update was taken."""
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
        return StepResult(found | norms | counts | rate, dict(self._tally.seen))


def _numbers_of(
    loss: StepLoss,
    samples: Sequence[Sample],
    tokens: Tokens,
    read: Read,
    reference: Numbers | None,
) -> Numbers:
    """Call a loss's `prepare` and return its number for each trained token (N,). `tokens`, `read`, `reference` and the result
    are in the order of the rows.

    Raises `EngineError`, naming the loss, if the loss does not give one number for each token, `ConfigError` if it fails on
    numbers that nobody computed, and `NonFiniteError` if a number is not finite.
    """
    logprobs, missing = read.logprobs, tokens.unknown
    began = logprobs if tokens.begun is None else tokens.begun
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
        entropy=read.entropy,
        top_logprobs=read.top_logprobs,
        top_ids=read.top_ids,
    )
    found = np.asarray(prepared_by(loss, step))
    if found.shape != (len(tokens),):
        raise EngineError(
            f"{_named(loss)}.prepare gave an array of shape {found.shape} for {len(tokens)} tokens: it must give one number "
            "for each token"
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
    """Return the rows with `reference` and `prepared` set from arrays (N,) over their trained tokens, which are in the order of
    the rows; other tokens get NaN. None leaves a field unset."""
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
    """Return, for each token, the index of the span that it lies in, and all spans of the rows. Raises `DataError` for a token
    outside of all spans."""
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
