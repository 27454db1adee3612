"""Rows before they are tensors: whether they can be trained on, how they are cut, and which are computed together.

The invariant: nothing here changes what a token is predicted from, nor its share of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning.batch.sample import Sample, TokenSpan
from lightning.errors import DataError


def by_call(sample: Sample) -> list[Sample]:
    """A row cut into one for each of its calls, with weight on that call's response only."""
    parts = []
    for span in sample.spans:
        own = slice(span.stop)
        weights = np.zeros(span.stop, np.float32)
        weights[span.start :] = sample.weights[span.start : span.stop]
        parts.append(
            replace(
                sample,
                ids=sample.ids[own],
                weights=weights,
                advantages=sample.advantages[own],
                logprobs=sample.logprobs[own],
                versions=sample.versions[own],
                spans=(span,),
                reference=None if sample.reference is None else sample.reference[own],
                prepared=None if sample.prepared is None else sample.prepared[own],
            )
        )
    return parts


def is_trained(sample: Sample) -> bool:
    """Whether a row has a share of the loss, or of the critic's."""
    return bool(sample.weights.any()) or any(span.value_weight != 0.0 for span in sample.spans)


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
    elif any(not _can_be_valued(span) for span in sample.spans):
        problem = "the value that a state should have, or its weight, is not finite"
    if problem:
        raise DataError(f"the training row of {name(sample)} cannot be trained on: {problem}")


def _can_be_valued(span: TokenSpan) -> bool:
    return span.value_weight == 0.0 or bool(np.isfinite((span.value_weight, span.value_target)).all())


def _first_call(sample: Sample, place: int) -> str:
    """The earliest call of a row that has the token at `place` in its prompt or response, for messages."""
    span = min((span for span in sample.spans if place < span.stop), key=lambda span: span.stop, default=None)
    return f", first in call {span.seq}," if span else ""


def name(sample: Sample) -> str:
    """The calls of a row, for messages."""
    spans = [f"rollout {span.rollout} attempt {span.attempt} call {span.seq}" for span in sample.spans]
    return spans[0] + (f" and {len(spans) - 1} more" if len(spans) > 1 else "") if spans else "no call"
