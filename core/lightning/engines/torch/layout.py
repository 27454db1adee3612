"""What a pass over rows is for, and how rows go through the model: one by one, or over their prefix tree.

The invariant: every wanted token and every valued state of every row is exactly one entry, with all that its loss is made
of, however the rows are computed; entries of one token that rows share are computed together and each has its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lightning.batch.digest import span_digest
from lightning.batch.sample import Sample
from lightning.engines.torch.model import CausalLM
from lightning.errors import EngineError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.floating]
"""float32, or float64 where the model computes in it."""

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say when memory runs out outside torch's CUDA allocator: in the driver, in a library, on a CPU."""


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


@dataclass(frozen=True, slots=True)
class Part:
    """What is computed at one time: hidden states, and the entries that are read from them."""

    hidden: torch.Tensor
    """(R, H)."""
    tokens: Ints
    """Which tokens of the layout."""
    before: Ints
    """The row of `hidden` that predicts each."""
    states: Ints
    """Which states of the layout."""
    at: Ints
    """The row of `hidden` that is each."""
    what: str
    """The rows, for messages."""


Visit = Callable[[Part], torch.Tensor | None]
"""What is done with a part; the loss that it returns is differentiated at once."""


class Layout(Protocol):
    """How rows go through the model, each cut to its length."""

    @property
    def samples(self) -> Sequence[Sample]:
        """The rows."""

    @property
    def lengths(self) -> Sequence[int]:
        """How many tokens of each are computed."""

    @property
    def least(self) -> int:
        """The budget below which passes do not get smaller."""

    @property
    def least_text(self) -> str:
        """What is computed at one time then, for messages."""

    @property
    def tokens(self) -> Tokens:
        """What is predicted, in the layout's own order."""

    @property
    def states(self) -> States:
        """What is valued, in the layout's own order."""

    def walk(self, lm: CausalLM, budget: int, visit: Visit) -> int:
        """Visit every entry once, at most `budget` padded tokens at a time; returns how many tokens were computed."""

    def again(self, samples: Sequence[Sample]) -> Layout:
        """The layout of rows with the same ids and spans, of which other numbers are known now."""


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


class Seen:
    """What the tensors held that the losses of a layout's tokens were computed on."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._targets = np.full(len(tokens), -1, np.int32)
        self._sampled = np.full(len(tokens), np.inf, np.float32)

    def note(self, chosen: Ints, targets: torch.Tensor, sampled: torch.Tensor) -> None:
        """Read the tensors of some tokens back."""
        self._targets[chosen] = targets.cpu().numpy()
        self._sampled[chosen] = sampled.cpu().numpy()

    def digests(self, samples: Sequence[Sample]) -> dict[tuple[str, int, int], str]:
        """The fingerprint of each span. Of a token without a weight, which is in no loss, it has what the row says."""
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
                found[key] = span_digest(ids[span.start : span.stop], sampled[span.start : span.stop])
        return found


@contextmanager
def failing(doing: str, what: str) -> Iterator[None]:
    """Whatever torch raises in a pass becomes an `EngineError`; a shortage of memory always an `OutOfMemoryError`."""
    try:
        yield
    except (torch.OutOfMemoryError, EngineError):
        raise
    except (RuntimeError, IndexError) as error:
        if any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise torch.OutOfMemoryError(str(error)) from error
        raise EngineError(f"the {doing} failed on {what}: {error}") from error
