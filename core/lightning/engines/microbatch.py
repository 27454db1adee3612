"""Micro-batches: the tensors that a loss is computed on, the digests of their content, and the numbers that a step adds up.

The invariant: the digests are computed from the tensors on the device that the loss was computed on, read back from there; and
every number is a sum, a maximum or a quantile over tokens, so micro-batches can be added in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightning.batch.sample import Sample, span_digest
from lightning.engines.logprob_gap import quantile
from lightning.engines.rows import Ints, Numbers, Tokens, row_order
from lightning.losses.protocol import TokenBatch
from lightning.losses.terms import mismatch_metrics


def token_batch(tokens: Tokens, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[TokenBatch, torch.Tensor]:
    """Return a loss function's batch of some tokens (N,), and the tensor of the sampler's logprobs of them. Where these are
    NaN, the batch's old logprobs are those that the step began with, or the current ones if these are not known."""
    kind, device = logprobs.dtype, logprobs.device

    def tensor(numbers: Numbers) -> torch.Tensor:
        return torch.from_numpy(numbers).to(device, kind)

    sampled = torch.from_numpy(tokens.sampled).to(device)
    old = sampled.to(kind)
    has_old = ~old.isnan()
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
        and logprobs are taken from the row."""
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
        for name, value in {"entropy": entropy, **metrics}.items():
            if name.endswith("_max"):
                self._maxima[name] = max(self._maxima.get(name, -float("inf")), value)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value

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
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in other._maxima.items():
            self._maxima[name] = max(self._maxima.get(name, -float("inf")), value)
        if other._states:
            self.add_states(other._states, other._metrics)

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics so far, weighted sums as weighted means. A metric without measurements is absent: means if
        no token has weight, gaps if no logprob was compared."""
        gaps = np.concatenate([np.zeros(0, np.float32), *self._gaps])
        means = {name: value / self._weight for name, value in self._sums.items()} if self._weight else {}
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
