"""What verl's engine calls with a micro-batch's outputs: our losses on exactly the tokens of its rows.

The invariant: every trained token of a rank's rows is in one call of the loss, with its own weight; filler rows have none,
and how verl packs and orders rows changes nothing. Nothing is raised here: a rank that stopped would leave the others
waiting for it in a collective for ever, so what is wrong is noted, and the trainer acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning.batch.sample import Sample
from lightning.engines.batches import Seen, token_batch
from lightning.engines.rows import name
from lightning.engines.tally import Tally
from lightning.engines.tokens import Ints, reordered, trained_tokens
from lightning.losses.protocol import Loss

if TYPE_CHECKING:
    from lightning.engines.verl.api import TensorDict


@dataclass(slots=True)
class Report:
    """What one rank says of its share of a step."""

    tally: Tally = field(default_factory=Tally)
    problem: str = ""
    """What is wrong with a loss; empty when nothing is."""


class LossPass:
    """A loss function as verl calls it. `samples` are the rank's rows, in the order of the `row` numbers of its data."""

    def __init__(self, samples: Sequence[Sample], loss: Loss, step: int) -> None:
        self._samples, self._loss, self._step = samples, loss, step
        self._tokens = trained_tokens(samples)
        self._starts = np.searchsorted(self._tokens.rows, np.arange(len(samples) + 1))
        self._seen = Seen(self._tokens)
        self._computed = 0
        self.report = Report()

    def __call__(
        self, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss of a micro-batch, times the number of data-parallel ranks, over which gradients will be averaged."""
        ids, rows = data["input_ids"], data["row"].tolist()
        self._computed += ids.values().numel()
        self.report.tally.parts += 1
        logprobs = model_output["log_probs"].values()
        chosen = np.concatenate([np.arange(self._starts[row], self._starts[row + 1]) for row in rows])
        if not len(chosen):
            return logprobs.sum() * 0.0, {}
        places = torch.from_numpy(self._places(ids.offsets().tolist(), rows)).to(logprobs.device)
        tokens = reordered(self._tokens, chosen)
        batch, sampled = token_batch(
            tokens, logprobs.float()[places - 1], model_output["entropy"].values().float()[places - 1]
        )
        self._seen.note(chosen, ids.values()[places], sampled)
        try:
            output = self._loss(batch)
        except Exception as error:  # noqa: BLE001 — it is anybody's function, and the other ranks go on
            self._note(f"the loss raised {error!r}", rows)
            return logprobs.sum() * 0.0, {}
        value = float(output.loss.detach())
        if not math.isfinite(value) or not output.loss.requires_grad:
            self._note(f"the loss is {value}" + ("" if output.loss.requires_grad else ", without a gradient"), rows)
            return logprobs.sum() * 0.0, {}
        self.report.tally.add(batch, value, output.metrics)
        return output.loss * float(data["dp_size"]), {}

    def finished(self) -> Report:
        """The report, when all micro-batches are through."""
        self.report.tally.computed(self._computed, self._seen.digests(self._samples))
        return self.report

    def _places(self, offsets: Sequence[int], rows: Sequence[int]) -> Ints:
        """Where the trained tokens of some rows stand in the packed ids."""
        columns = [self._tokens.columns[self._starts[row] : self._starts[row + 1]] for row in rows]
        places: Ints = np.concatenate([own + offset for own, offset in zip(columns, offsets, strict=False)])
        return places

    def _note(self, problem: str, rows: Sequence[int]) -> None:
        named = name(self._samples[rows[0]])
        self.report.problem = self.report.problem or (
            f"{problem} at step {self._step} in {len(rows)} rows (the first: {named})"
        )
