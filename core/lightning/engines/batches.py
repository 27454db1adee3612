"""From rows' entries to the tensors a loss is computed on, and back: what these tensors held.

The invariant: what is reported as seen is read back from the very tensors that the loss was computed on, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lightning.batch.digest import span_digest
from lightning.batch.sample import Sample
from lightning.engines.tokens import Ints, Numbers, States, Tokens, row_order
from lightning.losses.protocol import LossOutput, TokenBatch
from lightning.losses.value import value_loss


def token_batch(tokens: Tokens, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[TokenBatch, torch.Tensor]:
    """What a loss function sees of some tokens (N,), and the tensor of their sampler's logprobs; where these are NaN the old
    logprobs are the current ones."""
    kind, device = logprobs.dtype, logprobs.device

    def tensor(numbers: Numbers) -> torch.Tensor:
        return torch.from_numpy(numbers).to(device, kind)

    sampled = torch.from_numpy(tokens.sampled).to(device)
    old = sampled.to(kind)
    has_old = ~old.isnan()
    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.where(has_old, old, logprobs.detach()),
        advantages=tensor(tokens.advantages),
        weights=tensor(tokens.weights),
        entropy=entropy,
        has_old=has_old,
        versions=torch.from_numpy(tokens.versions).to(device),
        reference=None if tokens.reference is None else tensor(tokens.reference),
        prepared=None if tokens.prepared is None else tensor(tokens.prepared),
    )
    return batch, sampled


def state_loss(states: States, values: torch.Tensor) -> LossOutput:
    """The critic's loss of some states (M,) that it values so."""
    targets, weights = (
        torch.from_numpy(numbers).to(values.device, values.dtype) for numbers in (states.targets, states.weights)
    )
    return value_loss(values, targets, weights)


class Seen:
    """What the tensors held that the losses of some tokens were computed on."""

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
