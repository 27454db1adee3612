"""What every engine does around a step: what a loss of a whole step wants to know before the gradient pass, the warm-up, and
what a step reports.

The invariant: `prepare` is called once for a step and sees every trained token of it, in the order of the rows and of the
tokens in each, whatever computes them and however often memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning.batch.sample import Sample, TokenSpan
from lightning.engines.failures import NonFiniteError
from lightning.engines.microbatch import Tally
from lightning.engines.protocol import StepResult
from lightning.engines.rows import Numbers, Tokens, name
from lightning.errors import DataError, EngineError
from lightning.losses.protocol import Loss, StepLoss, StepTokens, needs_reference


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


def taken(tally: Tally, norms: dict[str, float], lr: float) -> StepResult:
    """What a step reports that was taken at this rate, on a gradient of these norms."""
    return StepResult({**tally.metrics(), **norms, "lr": lr, "stepped": 1.0}, tally.seen)


def not_taken(tally: Tally) -> StepResult:
    """What one reports whose rows have no weight at all."""
    return StepResult({**tally.metrics(), "grad_norm": 0.0, "lr": 0.0, "stepped": 0.0}, {})


def _numbers_of(
    loss: StepLoss, samples: Sequence[Sample], tokens: Tokens, logprobs: Numbers, reference: Numbers | None
) -> Numbers:
    """What a loss says of each trained token (N,), in the order of the rows; `tokens`, `logprobs` and `reference` are so.

    Raises `EngineError`, naming the loss, when that is not one number for each, and `NonFiniteError` when one is not finite.
    """
    missing = np.isnan(tokens.sampled)
    calls, spans = _calls_of(samples, tokens)
    step = StepTokens(
        logprobs=logprobs,
        old_logprobs=np.where(missing, logprobs, tokens.sampled).astype(logprobs.dtype, copy=False),
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
