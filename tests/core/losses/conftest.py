"""A policy so small that a loss can be written down sequence by sequence, and an engine for it that keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample, TokenSpan
from lightning.batch.trajectory import Group, Trajectory
from lightning.losses.protocol import Loss, StepLoss, StepTokens, TokenBatch, needs_reference
from lightning.testing.trajectories import make_trajectory
from lightning.types import Transition, logprobs

VOCAB = 7


@dataclass(frozen=True)
class Result:
    loss: float
    gradient: torch.Tensor
    metrics: dict[str, float]


class TinyEngine:
    """p(token | context) = softmax(table[last token of the context]), in float64, with a reference model of the same kind."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table, self.reference, self.sampler = (
            torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) for _ in range(3)
        )
        self.sampler = self.table + 0.2 * self.sampler
        self.table.requires_grad_()

    def call_logprobs(self, call: Transition, table: torch.Tensor | None = None) -> torch.Tensor:
        """Of one call's response tokens, shape (response,)."""
        context = [call.prompt_ids[-1], *call.response_ids[:-1]]
        return self._logprobs(self.table if table is None else table, context, list(call.response_ids))

    def sampled(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the sampler's logprobs."""
        calls = tuple(
            replace(call, logprobs=logprobs(self.call_logprobs(call, self.sampler).tolist()))
            for call in trajectory.transitions
        )
        return replace(trajectory, transitions=calls)

    def group(self, name: str, rewards: Sequence[float], lengths: Sequence[Sequence[int]], seed: int = 0) -> Group:
        """A group whose rollout i has a call of random tokens for each of `lengths[i]`."""
        numbers = np.random.default_rng(seed)
        members = []
        for index, (reward, own) in enumerate(zip(rewards, lengths, strict=True)):
            calls = [
                (numbers.integers(0, VOCAB, 2).tolist(), numbers.integers(0, VOCAB, length).tolist()) for length in own
            ]
            member = make_trajectory(calls, rollout=f"{name}/{index}", group=name, index=index, reward=reward)
            members.append(self.sampled(member))
        return Group(name, tuple(members))

    def step(
        self, samples: Sequence[Sample], loss: Loss, cut: Callable[[int], Sequence[Sequence[int]]] | None = None
    ) -> Result:
        """Loss, gradient and summed metrics. `cut(N)` says which of the N tokens are computed together."""
        before, ids, places, spans = _tokens(samples)
        rows, columns = zip(*places, strict=True)
        flat = {
            name: _collect(samples, name, rows, columns) for name in ("logprobs", "advantages", "weights", "versions")
        }
        now = self._logprobs(self.table, before, ids).detach().numpy()
        reference = self._logprobs(self.reference, before, ids).numpy() if needs_reference(loss) else None
        old = np.where(np.isnan(flat["logprobs"]), now, flat["logprobs"])
        prepared = None
        if isinstance(loss, StepLoss):
            seen = StepTokens(
                now, old, flat["advantages"], flat["weights"], flat["versions"], reference, np.array(spans[0]), spans[1]
            )
            prepared = torch.from_numpy(np.asarray(loss.prepare(seen)))
        total, metrics = torch.zeros((), dtype=torch.float64), {}
        for part in cut(len(ids)) if cut else [range(len(ids))]:
            chosen = list(part)
            own = torch.tensor(chosen)
            output = loss(
                TokenBatch(
                    logprobs=self._logprobs(self.table, [before[i] for i in chosen], [ids[i] for i in chosen]),
                    old_logprobs=torch.from_numpy(old)[own],
                    advantages=torch.from_numpy(flat["advantages"].astype(np.float64))[own],
                    weights=torch.from_numpy(flat["weights"].astype(np.float64))[own],
                    entropy=self._entropy([before[i] for i in chosen]),
                    has_old=torch.from_numpy(~np.isnan(flat["logprobs"]))[own],
                    versions=torch.from_numpy(flat["versions"])[own],
                    reference=None if reference is None else torch.from_numpy(reference)[own],
                    prepared=None if prepared is None else prepared[own],
                )
            )
            total = total + output.loss
            for name, value in output.metrics.items():
                known = metrics.get(name, -np.inf if name.endswith("_max") else 0.0)
                metrics[name] = max(known, value) if name.endswith("_max") else known + value
        (gradient,) = torch.autograd.grad(total, self.table)
        return Result(total.item(), gradient, metrics)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """Of a loss that was written down by hand."""
        return torch.autograd.grad(loss, self.table)[0]

    def _logprobs(self, table: torch.Tensor, before: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        return torch.log_softmax(table[list(before)], -1)[range(len(ids)), list(ids)]

    def _entropy(self, before: Sequence[int]) -> torch.Tensor:
        log_p = torch.log_softmax(self.table[list(before)], -1)
        return -(log_p.exp() * log_p).sum(-1)


def _tokens(
    samples: Sequence[Sample],
) -> tuple[list[int], list[int], list[tuple[int, int]], tuple[list[int], tuple[TokenSpan, ...]]]:
    """Of all weighted tokens: the one before, the id, (row, column), and the span they lie in."""
    before, ids, places, calls = [], [], [], []
    spans = [span for sample in samples for span in sample.spans]
    first = 0
    for row, sample in enumerate(samples):
        for column in np.flatnonzero(sample.weights).tolist():
            before.append(int(sample.ids[column - 1]))
            ids.append(int(sample.ids[column]))
            places.append((row, column))
            calls.append(first + next(i for i, span in enumerate(sample.spans) if span.start <= column < span.stop))
        first += len(sample.spans)
    return before, ids, places, (calls, tuple(spans))


def _collect(samples: Sequence[Sample], name: str, rows: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    return np.array([getattr(samples[row], name)[column] for row, column in zip(rows, columns, strict=True)])


@pytest.fixture(scope="session")
def tiny() -> TinyEngine:
    return TinyEngine()
