"""What a pass over rows is for, and how rows go through the model: one by one, or over their prefix tree.

The invariant: every wanted token and every valued state is visited once, however the rows are computed; entries of one
token that rows share are computed together and each has its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning.batch.sample import Sample
from lightning.engines.out_of_memory import ran_out
from lightning.engines.tokens import Ints, States, Tokens
from lightning.engines.torch.model import CausalLM
from lightning.errors import EngineError


@dataclass(frozen=True, slots=True)
class LayoutPart:
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


Visit = Callable[[LayoutPart], torch.Tensor | None]
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


@contextmanager
def failing(doing: str, what: str) -> Iterator[None]:
    """Whatever torch raises in a pass becomes an `EngineError`; a shortage of memory always an `OutOfMemoryError`."""
    try:
        yield
    except (torch.OutOfMemoryError, EngineError):
        raise
    except (RuntimeError, IndexError) as error:
        if ran_out(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise EngineError(f"the {doing} failed on {what}: {error}") from error
