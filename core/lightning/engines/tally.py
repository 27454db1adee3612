"""What a step adds up over its micro-batches: the loss, its metrics, and what was seen.

The invariant: every number is a sum or a maximum over tokens, so micro-batches can be added in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning.losses.protocol import TokenBatch
from lightning.losses.value import value_metrics


class Tally:
    """Grows by one micro-batch at a time."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int, int], str] = {}
        self.parts = 0
        """Micro-batches, or passes over nodes, that had a loss."""
        self._loss = 0.0
        self._weight = 0.0
        self._tokens = self._forward = self._compared = 0
        self._gap_sum = self._gap_max = 0.0
        self._sums: dict[str, float] = {"entropy": 0.0, "clip_fraction": 0.0}
        self._maxima: dict[str, float] = {}
        self._values: dict[str, float] = {}

    def computed(self, tokens: int, seen: Mapping[tuple[str, int, int], str]) -> None:
        """Count the tokens that were computed, and what the tensors held of which calls."""
        self._forward += tokens
        self.seen.update(seen)

    def add(self, batch: TokenBatch, loss: float, metrics: Mapping[str, float]) -> None:
        """Count a micro-batch: its tokens, its loss and the weighted sums its loss function reported."""
        with torch.no_grad():
            gap = (batch.logprobs - batch.old_logprobs).abs()
            weight, entropy, total, compared = torch.stack([
                batch.weights.sum(),
                (batch.weights * batch.entropy).sum(),
                gap.sum(),
                batch.has_old.sum(),
            ]).tolist()  # fmt: skip
            largest = float(gap.max())
        self._loss += loss
        self._weight += weight
        self._tokens += len(batch.weights)
        self._gap_sum += total
        self._gap_max = max(self._gap_max, largest)
        self._compared += int(compared)
        for name, value in {"entropy": entropy, **metrics}.items():
            if name.endswith("_max"):
                self._maxima[name] = max(self._maxima.get(name, -float("inf")), value)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def add_values(self, sums: Mapping[str, float]) -> None:
        """Count some states that the critic valued, by the weighted sums of `value_loss`."""
        for name, value in sums.items():
            self._values[name] = self._values.get(name, 0.0) + value

    def merge(self, other: Tally) -> None:
        """Add what another worker counted, of other rows of the same step."""
        self.parts += other.parts
        self.computed(other._forward, other.seen)
        self._loss += other._loss
        self._weight += other._weight
        self._tokens += other._tokens
        self._compared += other._compared
        self._gap_sum += other._gap_sum
        self._gap_max = max(self._gap_max, other._gap_max)
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in other._maxima.items():
            self._maxima[name] = max(self._maxima.get(name, -float("inf")), value)
        self.add_values(other._values)

    def metrics(self) -> dict[str, float]:
        """The step's numbers so far; weighted sums become weighted means."""
        weight = self._weight or 1.0
        return {
            **{name: value / weight for name, value in self._sums.items()},
            **self._maxima,
            "loss": self._loss,
            "tokens": float(self._tokens),
            "tokens_forward": float(self._forward),
            "tokens_compared": float(self._compared),
            "microbatches": float(self.parts),
            "max_logprob_gap": self._gap_max,
            "mean_logprob_gap": self._gap_sum / max(1, self._compared),
            **value_metrics(self._values),
        }
