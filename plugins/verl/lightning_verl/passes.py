"""The loss function that verl's engine calls with a micro-batch's outputs: our losses on exactly the tokens of its rows.

The invariant: every trained token and every valued state of a rank's rows is in exactly one call of the loss, with its own
weight; filler rows have none. How verl packs and orders rows changes nothing. Nothing is raised here, because the other ranks
would wait for ever in a collective for a rank that stopped; errors are noted, and the trainer acts on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.batch import Sample
from lightning.engines.protocol import Head
from lightning.engines.rows import (
    Ints,
    Seen,
    Tally,
    name,
    reordered,
    states_of,
    token_batch,
    trained_tokens,
)
from lightning.losses.protocol import Loss
from lightning.safe_text import counted

from lightning_verl.scores import SCORES

if TYPE_CHECKING:
    from lightning_verl.api import TensorDict


@dataclass(slots=True)
class Report:
    """A rank's report on its share of a step."""

    tally: Tally = field(default_factory=Tally)
    problem: str = ""
    """The error of a loss; empty without one."""
    nonfinite: str = ""
    """Which loss is not finite; empty when all are."""


class LossPass:
    """A loss function as verl calls it. `samples` are the rank's rows, in the order of the `row` numbers of verl's data."""

    def __init__(self, samples: Sequence[Sample], loss: Loss, head: Head | None, step: int) -> None:
        self._samples, self._loss, self._head, self._step = samples, loss, head, step
        self._tokens = trained_tokens(samples)
        self._states = states_of(samples, every=False)
        self._starts, self._firsts = (
            np.searchsorted(entries.rows, np.arange(len(samples) + 1)) for entries in (self._tokens, self._states)
        )
        self._seen = Seen(self._tokens)
        self._computed = 0
        self.report = Report()

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch, times the number of data-parallel ranks, because gradients are averaged over
        these."""
        ids, rows = data["input_ids"], data["row"].tolist()
        self._computed += ids.values().numel()
        self.report.tally.parts += 1
        loss = self._policy_loss(model_output, ids, rows)
        if loss is None:  # without a backward pass the other ranks would wait for this one
            loss = model_output["log_probs"].values().sum() * 0.0
        value = self._value_loss(model_output, ids, rows)
        return (loss if value is None else loss + value) * float(data["dp_size"]), {}

    def _policy_loss(
        self, model_output: Mapping[str, torch.Tensor], ids: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the policy's loss on the tokens of some rows; None without any, or after an error."""
        chosen = _entries(self._starts, rows)
        if not len(chosen):
            return None
        tokens = reordered(self._tokens, chosen)
        places = self._places(tokens.rows, tokens.columns, ids, rows)
        scores = [model_output[key].values()[places - 1] for key in SCORES if key in model_output]
        batch, sampled = token_batch(tokens, *(own.float() if own.is_floating_point() else own for own in scores))
        self._seen.note(chosen, ids.values()[places], sampled)
        try:
            output = self._loss(batch)
        except Exception as error:  # noqa: BLE001 — the loss is user code, and the other ranks go on
            self._note(f"the loss raised {error!r}", rows)
            return None
        value = float(output.loss.detach())
        if not output.loss.requires_grad:
            self._note(f"the loss is {value}, without a gradient", rows)
            return None
        if not math.isfinite(value):
            self._note_nonfinite(f"the loss is {value}", rows)
            return None
        self.report.tally.add(batch, value, output.metrics)
        return output.loss

    def _value_loss(
        self, model_output: Mapping[str, torch.Tensor], ids: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the head's loss on the states of some rows; None without any, or after an error."""
        chosen = _entries(self._firsts, rows)
        if not len(chosen):
            return None
        assert self._head is not None, "rows with value targets are refused without a head"
        states = reordered(self._states, chosen)
        values = model_output["values"].values()[self._places(states.rows, states.columns, ids, rows)]
        output = self._head.loss(values, states.targets, states.weights)
        value = float(output.loss.detach())
        if not math.isfinite(value):
            self._note_nonfinite(f"the value loss is {value}", rows)
            return None
        self.report.tally.add_states(output.metrics, self._head.metrics)
        return output.loss

    def finished(self) -> Report:
        """Return the report after the last micro-batch."""
        self.report.tally.computed(self._computed, self._seen.digests(self._samples))
        return self.report

    def _places(self, rows: Ints, columns: Ints, ids: Any, packed: Sequence[int]) -> torch.Tensor:
        """Return the positions of some tokens in the packed ids."""
        offsets = np.zeros(len(self._samples), np.int64)
        offsets[packed] = ids.offsets()[:-1].cpu().numpy()
        return torch.from_numpy(offsets[rows] + columns).to(ids.device)

    def _note(self, problem: str, rows: Sequence[int]) -> None:
        self.report.problem = self.report.problem or f"{problem} {self._where(rows)}"

    def _note_nonfinite(self, problem: str, rows: Sequence[int]) -> None:
        self.report.nonfinite = self.report.nonfinite or f"{problem} {self._where(rows)}"

    def _where(self, rows: Sequence[int]) -> str:
        return f"at step {self._step} in {counted(len(rows), 'row')} (the first: {name(self._samples[rows[0]])})"


def _entries(starts: Ints, rows: Sequence[int]) -> Ints:
    """Return the indices of some rows' entries; `starts` has where each row's entries begin."""
    found: Ints = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
    return found
