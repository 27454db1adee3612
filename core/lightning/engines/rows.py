"""Rows before they become tensors (checks, cutting, grouping into micro-batches, the lists of tokens with a loss and of states
with a value), and the micro-batches: their tensors, the digests of their content, and the numbers that a step adds up.

The invariant: nothing here changes the tokens that a token is predicted from, nor its share of the loss; and every wanted token
and every valued state of every row is exactly one entry of the lists, in any order. The digests are computed from the tensors
on the device that the loss was computed on, read back from there; and every number is a sum, a maximum or a quantile over
tokens, so micro-batches can be added in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lightning.batch.masks import SamplingMask
from lightning.batch.sample import Sample, TokenSpan, span_digest
from lightning.engines.logprob_gap import quantile
from lightning.errors import DataError
from lightning.losses.correction import mismatch_metrics
from lightning.losses.protocol import TokenBatch


def by_call(sample: Sample) -> list[Sample]:
    """Cut a row into one row for each of its calls, which ends with the call and has weight on its response only."""
    parts = []
    for span in sample.spans:
        weights = np.zeros(span.stop, np.float32)
        weights[span.start :] = sample.weights[span.start : span.stop]
        parts.append(replace(cut(sample, span.stop), weights=weights, spans=(span,)))
    return parts


def cut(sample: Sample, length: int) -> Sample:
    """Return the first `length` tokens of a row, for use if later tokens cannot influence the result. The spans stay unchanged,
    also those behind the cut."""
    names = ("ids", "weights", "advantages", "logprobs", "versions", "reference", "begun", "prepared")
    arrays = {name: getattr(sample, name) for name in (*names, "mask")}
    return replace(sample, **{name: array[:length] for name, array in arrays.items() if array is not None})


def is_trained(sample: Sample) -> bool:
    """Whether a row has a share of the policy's or the head's loss."""
    return bool(sample.weights.any()) or any(span.value_weight != 0.0 for span in sample.spans)


def unknown(sample: Sample) -> npt.NDArray[np.bool_]:
    """Return whether each token of a row (T,) has no old logprob by the sampler: it gave none, or one under a mask, while the
    loss is over all tokens."""
    missing: npt.NDArray[np.bool_] = np.isnan(sample.logprobs)
    return missing if sample.mask is None or not sample.over_all else missing | sample.mask.is_set


def trained_length(sample: Sample) -> int:
    """Return the length of a row up to the end of its last trained token or span; later tokens cannot influence the loss."""
    trained = np.flatnonzero(sample.weights)
    stop = max((span.stop for span in sample.spans), default=0)
    return max(int(trained[-1]) + 1 if len(trained) else 0, stop)


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group rows of similar length into micro-batches, as lists of indices, so that the number of rows times the longest row is
    at most `budget` tokens. A longer row makes a group of its own.

    The longest rows come first, so that a shortage of memory shows at once. The order depends on the lengths alone.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def check(sample: Sample, vocab_size: int) -> None:
    """Raise `DataError`, naming rollout, attempt and call, if the engine cannot train on a row."""
    size = len(sample.ids)
    trained = sample.weights != 0
    problem = ""
    if any(len(values) != size for values in (sample.weights, sample.advantages, sample.logprobs, sample.versions)):
        problem = "its arrays differ in length"
    elif not size:
        problem = "it has no tokens"
    elif int(sample.ids.min()) < 0 or int(sample.ids.max()) >= vocab_size:
        place = int(np.flatnonzero((sample.ids < 0) | (sample.ids >= vocab_size))[0])
        problem = (
            f"token id {sample.ids[place]} at index {place}{_first_call(sample, place)} is outside the model's vocabulary "
            f"of {vocab_size}: make the policy server serve the model that is trained"
        )
    elif trained[0]:
        problem = "its first token has a weight, but nothing precedes it"
    elif not np.isfinite(sample.weights).all() or not np.isfinite(sample.advantages[trained]).all():
        problem = "a weight or an advantage is not finite"
    elif np.isinf(sample.logprobs[trained]).any():
        problem = "a sampler logprob is infinite"
    elif not (np.isfinite(sample.temperature) and sample.temperature > 0):
        problem = f"its temperature is {sample.temperature}"
    elif any(not 0 < span.start < span.stop <= size for span in sample.spans):
        problem = "a span does not lie inside it"
    elif any(not _can_be_valued(span) for span in sample.spans):
        problem = "the value that a state should have, or its weight, is not finite"
    elif sample.mask is not None:
        problem = _mask_problem(sample, sample.mask, vocab_size)
    if problem:
        raise DataError(f"the training row of {name(sample)} cannot be trained on: {problem}")


def _mask_problem(sample: Sample, mask: SamplingMask, vocab_size: int) -> str:
    if len(mask) != len(sample):
        return f"it has sampling masks of {len(mask)} tokens and {len(sample)} tokens"
    if mask.vocab_size != vocab_size:
        return (
            f"its sampling mask is of a vocabulary of {mask.vocab_size} ids, and the model has {vocab_size}: make the policy "
            "server serve the model that is trained"
        )
    if flaw := mask.flaw():
        return flaw
    return (
        ""
        if mask.keeps(sample.ids)[sample.weights != 0].all()
        else "its sampling mask leaves out a token that is trained"
    )


def _can_be_valued(span: TokenSpan) -> bool:
    return span.value_weight == 0.0 or bool(np.isfinite((span.value_weight, span.value_target)).all())


def _first_call(sample: Sample, place: int) -> str:
    """Return, for messages, the earliest call of a row that has the token at `place` in its prompt or response; "" if none
    has."""
    span = min((span for span in sample.spans if place < span.stop), key=lambda span: span.stop, default=None)
    return f", first in call {span.seq}," if span else ""


def name(sample: Sample) -> str:
    """Return the first call of a row, with the number of its other calls, for messages."""
    spans = [f"rollout {span.rollout} attempt {span.attempt} call {span.seq}" for span in sample.spans]
    return spans[0] + (f" and {len(spans) - 1} more" if len(spans) > 1 else "") if spans else "no call"


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.floating]
"""float32, or float64 where the model computes in it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """N wanted tokens of some rows, as arrays of shape (N,). Token i stands at index `columns[i]` of row `rows[i]`; the hidden
    state at `columns[i] - 1` predicts it. `unknown` says whose `sampled` is no old logprob. `temperatures` is None if all are
    1; `reference`, `begun` and `prepared` are None if the rows lack them; `mask` is None if no token's is set, or if the loss
    is over all tokens."""

    rows: Ints
    columns: Ints
    targets: Ints
    weights: Floats
    advantages: Floats
    sampled: Floats
    unknown: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int32]
    temperatures: Floats | None
    reference: Numbers | None
    begun: Numbers | None
    prepared: Numbers | None
    mask: SamplingMask | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class States:
    """M states to value, as arrays of shape (M,). The hidden state at index `columns[i]` of row `rows[i]` is the state of a
    call's prompt, whose value should be `targets[i]`."""

    rows: Ints
    columns: Ints
    targets: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)


class Read(NamedTuple):
    """The numbers that a pass without a gradient reads of N tokens, as `StepTokens` has them: logprobs (N,), and if they are
    known entropies (N,), and the logprobs (N, k) and ids (N, k) of the most probable tokens."""

    logprobs: Numbers
    entropy: Numbers | None = None
    top_logprobs: Numbers | None = None
    top_ids: npt.NDArray[np.int32] | None = None


def trained_tokens(samples: Sequence[Sample]) -> Tokens:
    """Return the tokens with a weight, in the order of the rows and of the tokens in each."""
    return wanted_tokens(samples, [np.flatnonzero(sample.weights) for sample in samples])


def wanted_tokens(samples: Sequence[Sample], columns: Sequence[Ints]) -> Tokens:
    """Return the tokens at these `columns` of each row, in the order of the rows and of the columns."""

    def collect(name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
        values = [getattr(sample, name)[own] for sample, own in zip(samples, columns, strict=True)]
        found: npt.NDArray[Any] = np.concatenate([np.zeros(0, kind), *values])
        return found.astype(kind, copy=False)

    def collect_some(name: str) -> Numbers | None:
        if not samples or getattr(samples[0], name) is None:
            return None
        found: Numbers = np.concatenate([getattr(row, name)[own] for row, own in zip(samples, columns, strict=True)])
        return found

    rows = np.repeat(np.arange(len(samples)), [len(own) for own in columns])
    temperatures = np.array([sample.temperature for sample in samples], np.float32)
    return Tokens(
        rows=rows,
        columns=np.concatenate([np.zeros(0, np.int64), *columns]),
        targets=collect("ids", np.int64),
        weights=collect("weights", np.float32),
        advantages=collect("advantages", np.float32),
        sampled=collect("logprobs", np.float32),
        unknown=np.concatenate(
            [np.zeros(0, np.bool_), *(unknown(row)[own] for row, own in zip(samples, columns, strict=True))]
        ),
        versions=collect("versions", np.int32),
        temperatures=None if bool((temperatures == 1.0).all()) else temperatures[rows],
        reference=collect_some("reference"),
        begun=collect_some("begun"),
        prepared=collect_some("prepared"),
        mask=masks_at(samples, columns),
    )


def masks_at(samples: Sequence[Sample], columns: Sequence[Ints]) -> SamplingMask | None:
    """Return the sampling masks of the tokens at these `columns` of each row; None if none is set."""
    masks = [None if sample.over_all else sample.mask for sample in samples]
    size = next((mask.vocab_size for mask in masks if mask is not None), 0)
    if not size:
        return None
    parts = [
        SamplingMask.none(len(own), size) if mask is None else mask[own]
        for mask, own in zip(masks, columns, strict=True)
    ]
    found = SamplingMask.joined(parts)
    return found if found.is_set.any() else None


def states_of(samples: Sequence[Sample], *, every: bool) -> States:
    """Return the states before the spans: before `every` span, or only before spans with a share of the value loss."""
    spans = [
        (row, span) for row, sample in enumerate(samples) for span in sample.spans if every or span.value_weight != 0.0
    ]
    return States(
        rows=np.array([row for row, _ in spans], np.int64),
        columns=np.array([span.start - 1 for _, span in spans], np.int64),
        targets=np.array([span.value_target for _, span in spans], np.float64),
        weights=np.array([span.value_weight for _, span in spans], np.float64),
    )


Entries = TypeVar("Entries", Tokens, States)


def reordered(entries: Entries, order: Ints) -> Entries:
    """Return the entries at the indices `order`: all in another order, or some of them."""
    values = {item.name: getattr(entries, item.name) for item in fields(entries)}
    return replace(entries, **{name: value[order] for name, value in values.items() if value is not None})


def row_order(entries: Tokens | States) -> Ints:
    """Return the indices that sort entries by row, and by column within a row."""
    order: Ints = np.lexsort((entries.columns, entries.rows))
    return order


def token_batch(
    tokens: Tokens, logprobs: torch.Tensor, entropy: torch.Tensor, *top: torch.Tensor
) -> tuple[TokenBatch, torch.Tensor]:
    """Return a loss function's batch of some tokens (N,), and the tensor of the sampler's logprobs of them. Where these
    are unknown, the batch's old logprobs are those that the step began with, or the current ones if these are not known. `top`
    are the logprobs (N, k) and ids (N, k) of the most probable tokens, or nothing."""
    kind, device = logprobs.dtype, logprobs.device

    def tensor(numbers: Numbers) -> torch.Tensor:
        return torch.from_numpy(numbers).to(device, kind)

    sampled = torch.from_numpy(tokens.sampled).to(device)
    old = sampled.to(kind)
    has_old = torch.from_numpy(~tokens.unknown).to(device)
    began = logprobs.detach() if tokens.begun is None else tensor(tokens.begun)
    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.where(has_old, old, began),
        advantages=tensor(tokens.advantages),
        weights=tensor(tokens.weights),
        entropy=entropy,
        has_old=has_old,
        versions=torch.from_numpy(tokens.versions).to(device),
        reference=None if tokens.reference is None else tensor(tokens.reference),
        prepared=None if tokens.prepared is None else tensor(tokens.prepared),
        **dict(zip(("top_logprobs", "top_ids"), top, strict=False)),
    )
    return batch, sampled


class Seen:
    """The ids and sampler's logprobs of some tokens as they are in the tensors on the device that losses were computed on."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._targets = np.full(len(tokens), -1, np.int32)
        self._sampled = np.full(len(tokens), np.inf, np.float32)

    def note(self, chosen: Ints, targets: torch.Tensor, sampled: torch.Tensor) -> None:
        """Copy the tensors of the `chosen` tokens from the device: their ids and the sampler's logprobs."""
        self._targets[chosen] = targets.cpu().numpy()
        self._sampled[chosen] = sampled.cpu().numpy()

    def digests(self, samples: Sequence[Sample]) -> dict[tuple[str, int, int], str]:
        """Return the digest of each span, by rollout, attempt and call. Tokens without a weight are in no loss, so their ids
        and logprobs are taken from the row, and so are all sampling masks."""
        order = row_order(self._tokens)
        starts = np.searchsorted(self._tokens.rows[order], np.arange(len(samples) + 1)).tolist()
        found = {}
        for row, sample in enumerate(samples):
            own = order[starts[row] : starts[row + 1]]
            ids, sampled = sample.ids.copy(), sample.logprobs.copy()
            ids[self._tokens.columns[own]] = self._targets[own]
            sampled[self._tokens.columns[own]] = self._sampled[own]
            for span in sample.spans:
                key = (span.rollout, span.attempt, span.seq)
                own_part = slice(span.start, span.stop)
                mask = None if sample.mask is None else sample.mask[own_part]
                found[key] = span_digest(ids[own_part], sampled[own_part], mask)
        return found


class Tally:
    """The numbers of a step, added up over its micro-batches."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int, int], str] = {}
        self.tree = False
        """Whether the rows were computed over their prefix tree."""
        self.parts = 0
        """The number of micro-batches, or of passes over nodes of a tree, that had a loss."""
        self._loss = 0.0
        self._weight = 0.0
        self._tokens = self._forward = 0
        self._gaps: list[npt.NDArray[np.floating]] = []
        """|trainer - sampler| of the tokens that have a sampler's logprob."""
        self._sums: dict[str, float] = {"entropy": 0.0, "clip_fraction": 0.0}
        self._weights: dict[str, float] = {}
        """The weight of the tokens whose loss reported each sum."""
        self._maxima: dict[str, float] = {}
        self._states: dict[str, float] = {}
        self._metrics: Callable[[Mapping[str, float]], dict[str, float]] = dict
        """The metrics of the sums of states."""

    def computed(self, tokens: int, seen: Mapping[tuple[str, int, int], str]) -> None:
        """Add the number of tokens that were computed, and the digests of the calls among them."""
        self._forward += tokens
        self.seen.update(seen)

    def add(self, batch: TokenBatch, loss: float, metrics: Mapping[str, float]) -> None:
        """Add a micro-batch: its tokens, its loss and the weighted sums that its loss function returned."""
        with torch.no_grad():
            gap = (batch.logprobs - batch.old_logprobs).abs()
            weight, entropy = torch.stack([batch.weights.sum(), (batch.weights * batch.entropy).sum()]).tolist()
            self._gaps.append(gap[batch.has_old].cpu().numpy())
        self._loss += loss
        self._weight += weight
        self._tokens += len(batch.weights)
        self._add_sums({"entropy": entropy, **metrics}, dict.fromkeys(["entropy", *metrics], weight))

    def _add_sums(self, metrics: Mapping[str, float], weights: Mapping[str, float]) -> None:
        """Add weighted sums, each with its weight; of numbers whose names end in `_max`, the largest is kept."""
        for name, value in metrics.items():
            if name.endswith("_max"):
                self._maxima[name] = max(self._maxima.get(name, -float("inf")), value)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._weights[name] = self._weights.get(name, 0.0) + weights.get(name, 0.0)

    def add_states(self, sums: Mapping[str, float], metrics: Callable[[Mapping[str, float]], dict[str, float]]) -> None:
        """Add the states of a micro-batch that a head valued, by the sums of `Head.loss`. `metrics` is the head's."""
        self._metrics = metrics
        for name, value in sums.items():
            self._states[name] = self._states.get(name, 0.0) + value

    def merge(self, other: Tally) -> None:
        """Add the tally of other rows of the same step, such as another worker's."""
        self.parts += other.parts
        self.tree |= other.tree
        self.computed(other._forward, other.seen)
        self._loss += other._loss
        self._weight += other._weight
        self._tokens += other._tokens
        self._gaps += other._gaps
        self._add_sums(other._sums | other._maxima, other._weights)
        if other._states:
            self.add_states(other._states, other._metrics)

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics so far, weighted sums as means over the tokens whose loss reported them. A metric without
        measurements is absent: means if no token has weight, gaps if no logprob was compared."""
        gaps = np.concatenate([np.zeros(0, np.float32), *self._gaps])
        shares = {name: self._weights.get(name) or self._weight for name in self._sums}
        means = {name: value / shares[name] for name, value in self._sums.items() if shares[name]}
        return {
            **mismatch_metrics(means | self._maxima),
            **({"loss": self._loss} if self.parts else {}),
            "tokens": float(self._tokens),
            "tokens_forward": float(self._forward),
            "tokens_compared": float(len(gaps)),
            "microbatches": float(self.parts),
            "tree": float(self.tree),
            **(gap_metrics(gaps) if len(gaps) else {}),
            **self._metrics(self._states),
        }


def gap_metrics(gaps: npt.NDArray[np.floating]) -> dict[str, float]:
    """Return the metrics of the gaps |trainer - sampler| of the compared tokens, of which there is at least one."""
    most = quantile(gaps, 0.999)
    return {
        "max_logprob_gap": float(gaps.max()),
        "mean_logprob_gap": float(gaps.mean(dtype=np.float64)),
        **({} if most is None else {"p999_logprob_gap": most}),
    }
