"""Micro-batches: which rows are computed together, and their tensors.

The invariant: rows are padded on the right only. With causal attention no real token can see the padding behind it, so no
attention mask is needed and positions count from 0; and how rows are grouped changes no token's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightning.batch.digest import span_digest
from lightning.batch.sample import Sample
from lightning.errors import DataError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """B rows of up to T tokens, and the N tokens among them whose logprobs are wanted."""

    samples: tuple[Sample, ...]
    ids: torch.Tensor
    """(B, T) int64; zeros behind a row's end."""
    sampled: torch.Tensor
    """(B, T) float32: the sampler's logprobs, NaN where there are none."""
    rows: torch.Tensor
    """(N,) int64: the row of each wanted token."""
    columns: torch.Tensor
    """(N,) int64: its index in the row, at least 1; its logprob comes from the hidden state at `columns - 1`."""
    weights: torch.Tensor
    """(N,) float32."""
    advantages: torch.Tensor
    """(N,) float32."""
    temperatures: torch.Tensor | None
    """(N,) float32, or None when all are 1."""

    @property
    def targets(self) -> torch.Tensor:
        """(N,) the wanted tokens' ids."""
        return self.ids[self.rows, self.columns]

    @property
    def old_logprobs(self) -> torch.Tensor:
        """(N,) the sampler's logprobs of the wanted tokens."""
        return self.sampled[self.rows, self.columns]

    @property
    def text(self) -> str:
        """The rows, for messages."""
        count, width = self.ids.shape
        return f"{count} rows of up to {width} tokens ({name(self.samples[0])} to {name(self.samples[-1])})"

    def digests(self) -> dict[tuple[str, int, int], str]:
        """The fingerprint of each span, read back from the tensors."""
        ids, sampled = self.ids.cpu().numpy(), self.sampled.cpu().numpy()
        return {
            (span.rollout, span.attempt, span.seq): span_digest(
                ids[row, span.start : span.stop], sampled[row, span.start : span.stop]
            )
            for row, sample in enumerate(self.samples)
            for span in sample.spans
        }


def by_call(sample: Sample) -> list[Sample]:
    """A row cut into one for each of its calls, with weight on that call's response only."""
    parts = []
    for span in sample.spans:
        weights = np.zeros(span.stop, np.float32)
        weights[span.start :] = sample.weights[span.start : span.stop]
        parts.append(
            Sample(
                sample.ids[: span.stop],
                weights,
                sample.advantages[: span.stop],
                sample.logprobs[: span.stop],
                sample.versions[: span.stop],
                (span,),
                sample.temperature,
            )
        )
    return parts


def trained_length(sample: Sample) -> int:
    """Tokens of a row up to its last trained one; what follows cannot influence the loss."""
    trained = np.flatnonzero(sample.weights)
    stop = max((span.stop for span in sample.spans), default=0)
    return max(int(trained[-1]) + 1 if len(trained) else 0, stop)


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group rows of similar length so that rows times longest row stays within `budget` tokens (one row always fits).

    Longest first: a shortage of memory shows at once. The order depends on the lengths alone.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(samples: Sequence[Sample], lengths: Sequence[int], device: torch.device, *, every: bool) -> Microbatch:
    """Tensors of some rows, each cut to its length. Wanted are the tokens with weight or, with `every`, all but the first."""
    shape = (len(samples), max(lengths))
    ids, sampled = np.zeros(shape, np.int64), np.full(shape, np.nan, np.float32)
    weights, advantages, wanted = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, bool)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        ids[row, :length] = sample.ids[:length]
        sampled[row, :length] = sample.logprobs[:length]
        weights[row, :length] = sample.weights[:length]
        advantages[row, :length] = sample.advantages[:length]
        wanted[row, 1:length] = True if every else sample.weights[1:length] != 0
    rows, columns = np.nonzero(wanted)
    temperatures = np.array([sample.temperature for sample in samples], np.float32)
    uniform = bool((temperatures == 1.0).all())
    return Microbatch(
        samples=tuple(samples),
        ids=torch.from_numpy(ids).to(device),
        sampled=torch.from_numpy(sampled).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(columns).to(device),
        weights=torch.from_numpy(weights[rows, columns]).to(device),
        advantages=torch.from_numpy(advantages[rows, columns]).to(device),
        temperatures=None if uniform else torch.from_numpy(temperatures[rows]).to(device),
    )


def check(sample: Sample, vocab_size: int) -> None:
    """Refuse a row that cannot be computed on: raises `DataError` naming its rollout, attempt and call."""
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
    if problem:
        raise DataError(f"the training row of {name(sample)} cannot be trained on: {problem}")


def _first_call(sample: Sample, place: int) -> str:
    """The earliest call of a row that has the token at `place` in its prompt or response, for messages."""
    span = min((span for span in sample.spans if place < span.stop), key=lambda span: span.stop, default=None)
    return f", first in call {span.seq}," if span else ""


def name(sample: Sample) -> str:
    """The calls of a row, for messages."""
    spans = [f"rollout {span.rollout} attempt {span.attempt} call {span.seq}" for span in sample.spans]
    return spans[0] + (f" and {len(spans) - 1} more" if len(spans) > 1 else "") if spans else "no call"
