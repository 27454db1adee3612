"""What is asked of rows: the tokens whose loss, and the states whose value is wanted, with all that these are made of.

The invariant: every wanted token and every valued state of every row is exactly one entry, in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning.batch.sample import Sample

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.floating]
"""float32, or float64 where the model computes in it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """N wanted tokens: `rows` and `columns` say which token of which row each is. It is predicted from the hidden state at
    `columns - 1`. `temperatures` is None when all are 1."""

    rows: Ints
    columns: Ints
    targets: Ints
    weights: Floats
    advantages: Floats
    sampled: Floats
    versions: npt.NDArray[np.int32]
    temperatures: Floats | None
    reference: Numbers | None
    prepared: Numbers | None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class States:
    """M states to value: the hidden state at `columns` of `rows` stands for the prompt of a call that has the target."""

    rows: Ints
    columns: Ints
    targets: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)


def trained_tokens(samples: Sequence[Sample]) -> Tokens:
    """The tokens with a weight, in the order of the rows and of the tokens in each."""
    return wanted_tokens(samples, [np.flatnonzero(sample.weights) for sample in samples])


def wanted_tokens(samples: Sequence[Sample], columns: Sequence[Ints]) -> Tokens:
    """Some tokens of each row, in the order of the rows and of the tokens in each."""

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
        versions=collect("versions", np.int32),
        temperatures=None if bool((temperatures == 1.0).all()) else temperatures[rows],
        reference=collect_some("reference"),
        prepared=collect_some("prepared"),
    )


def states_of(samples: Sequence[Sample], *, every: bool) -> States:
    """The states before each span that has a share of the value loss, or before `every` span."""
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
    """The entries in another order, or some of them."""
    values = {item.name: getattr(entries, item.name) for item in fields(entries)}
    return replace(entries, **{name: value[order] for name, value in values.items() if value is not None})


def row_order(entries: Tokens | States) -> Ints:
    """The order in which entries come by rows, and by tokens in each."""
    order: Ints = np.lexsort((entries.columns, entries.rows))
    return order
