"""The supervised warm start: next-token prediction on what the assistant wrote in the demonstrations.

The invariant: rows, order and weights follow from the seed alone, so the same call makes the same model.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 — torch's own convention
from transformers import Qwen3ForCausalLM

from lightning_examples.recipe.chatml import Row

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic Newton-Schulz iteration, from the source of `Muon`."""


def orthogonalize(matrices: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Push the singular values of each matrix towards 1. `matrices` is (B, m, n) with m <= n, the result too."""
    x: torch.Tensor = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(1, 2)  # (B, m, m)
        b = torch.baddbmm(a, a, a, beta=_B, alpha=_C)
        x = torch.baddbmm(x, b, x, beta=_A)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal before they are applied (Keller Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon). For matrices only; give embeddings, output layers and vectors to AdamW.

    Matrices of one shape are stacked and treated together: for many tiny matrices on a CPU that is several times faster than
    one by one, and changes nothing else.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update. Nesterov momentum; the step is scaled by sqrt(rows / columns) where that exceeds 1."""
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[torch.nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"])
                if update.shape[0] > update.shape[1]:
                    update = update.T
                stacks[(update.shape[0], update.shape[1])].append((weight, update))
            for entries in stacks.values():
                directions = orthogonalize(torch.stack([update for _, update in entries]))
                for (weight, _), direction in zip(entries, directions, strict=True):
                    rows, columns = weight.shape
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    step = direction.T if rows > columns else direction
                    weight.add_(step, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


@dataclass(frozen=True, slots=True)
class Stage:
    """`share` of all steps are taken on `rows`; stages follow one another."""

    rows: Sequence[Row]
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Many small steps: that is what teaches a tiny model to copy out of its context."""

    steps: int = 3000
    tokens_per_step: int = 512
    """Padded tokens of a batch."""
    lr: float = 6e-3
    """AdamW's peak rate, for embeddings, the output layer and norms."""
    muon_lr: float = 3e-2
    """Muon's peak rate, for all other matrices."""
    warmup: float = 0.05
    """Share of the steps in which the rates rise."""
    final_lr: float = 0.1
    """Rates end here, as a share of their peak (cosine)."""
    seed: int = 0


def pretrain(
    model: Qwen3ForCausalLM,
    stages: Sequence[Stage],
    plan: Plan,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train in place and return the loss (nats per trained token) of every step; `report(step, loss)` hears each."""
    rng = random.Random(plan.seed)  # noqa: S311 — reproducible, not secret
    optimizers = _optimizers(model, plan)
    losses: list[float] = []
    for stage in stages:
        batches = _batches(stage.rows, plan.tokens_per_step, rng)
        for _ in range(round(plan.steps * stage.share)):
            rate = _rate(len(losses), plan)
            loss = batch_loss(model, next(batches))
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
            report(len(losses), losses[-1])
    return losses


def batch_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Mean cross entropy over the trained tokens of right-padded rows."""
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)  # (B, T); causal attention never looks right, so 0 pads well
    trained = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        trained[i, : len(row.ids)] = torch.tensor(row.trained)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
    chosen = trained[:, 1:]
    logits = model.lm_head(hidden[:, :-1][chosen])  # (N, V)
    return F.cross_entropy(logits, ids[:, 1:][chosen])


def _optimizers(model: Qwen3ForCausalLM, plan: Plan) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        plain = weight.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if plain else rest).append(weight)
    optimizers = [
        Muon(matrices, lr=plan.muon_lr),
        torch.optim.AdamW(rest, lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _rate(step: int, plan: Plan) -> float:
    rise = min(1.0, (step + 1) / max(1.0, plan.warmup * plan.steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / plan.steps))
    return rise * (plan.final_lr + (1 - plan.final_lr) * cosine)


def _batches(rows: Sequence[Row], tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless shuffled batches of rows of like length, at most `tokens` padded tokens each (one row at least)."""
    while True:
        order = rng.sample(rows, len(rows))
        epoch: list[list[Row]] = []
        for start in range(0, len(order), 512):
            epoch.extend(_cut(sorted(order[start : start + 512], key=lambda row: len(row.ids)), tokens))
        rng.shuffle(epoch)
        yield from epoch


def _cut(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:  # ascending in length, so the newest row is the widest
        if batch and len(row.ids) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
