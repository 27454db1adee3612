"""The critic's loss against its formula, and its metrics against numpy's, however states are split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning_credits.value_head import CriticHead

NUMBERS = st.lists(
    st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 2)), min_size=2, max_size=12
)  # fmt: skip


def tensors(numbers: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, targets, weights = (torch.tensor(column, dtype=torch.float64) for column in zip(*numbers, strict=True))
    return values.requires_grad_(), targets, weights


@given(NUMBERS)
def test_loss_and_gradient_are_the_formula(numbers: list[tuple[float, float, float]]) -> None:
    values, targets, weights = tensors(numbers)
    loss = CriticHead().loss(values, targets, weights).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(sum(w * (v - t) ** 2 / 2 for v, t, w in numbers))
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([w * (v - t) for v, t, w in numbers])


@given(NUMBERS, st.integers(1, 11))
def test_metrics_are_the_weighted_ones_however_states_are_split(
    numbers: list[tuple[float, float, float]], cut: int
) -> None:
    sums: dict[str, float] = {}
    for part in filter(None, (numbers[:cut], numbers[cut:])):
        for name, value in CriticHead().loss(*tensors(part)).metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    found = CriticHead().metrics(sums)
    values, targets, weights = np.array(numbers).T
    assert found["value_loss"] == pytest.approx(np.average((values - targets) ** 2, weights=weights) / 2)
    assert found["value_mean"] == pytest.approx(np.average(values, weights=weights), abs=1e-12)
    assert found["value_target"] == pytest.approx(np.average(targets, weights=weights), abs=1e-12)
    spread = np.average((targets - np.average(targets, weights=weights)) ** 2, weights=weights)
    errors = targets - values
    unexplained = np.average((errors - np.average(errors, weights=weights)) ** 2, weights=weights)
    if spread > 1e-6:
        assert found["value_explained_variance"] == pytest.approx(1 - unexplained / spread, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "explained"),
    [([0.0, 1.0, 2.0], 1.0), ([5.0, 5.0, 5.0], 0.0), ([3.0, 4.0, 5.0], 1.0), ([2.0, 1.0, 0.0], -3.0)],
)
def test_explained_variance_forgives_an_offset_but_not_an_order(values: list[float], explained: float) -> None:
    numbers = [(value, target, 1.0) for value, target in zip(values, (0.0, 1.0, 2.0), strict=True)]
    found = CriticHead().metrics(CriticHead().loss(*tensors(numbers)).metrics)
    assert found["value_explained_variance"] == pytest.approx(explained)


def test_equal_targets_and_no_states_are_no_division_by_zero() -> None:
    found = CriticHead().metrics(CriticHead().loss(*tensors([(0.3, 0.1, 1.0), (0.2, 0.1, 2.0)])).metrics)
    assert found["value_explained_variance"] == 0.0
    assert CriticHead().metrics({}) == {}


@pytest.mark.parametrize("target", [0.95, 0.1, 1e4, -1 / 3])
def test_targets_that_are_equal_in_float32_explain_nothing(target: float) -> None:
    """Also where they differ by the last digit."""
    targets = torch.full((1000,), target)
    targets[::3] = torch.nextafter(targets[::3], torch.tensor(float("inf")))
    values, weights = torch.linspace(-1, 1, 1000), torch.full((1000,), 1 / 1000)
    assert CriticHead().metrics(CriticHead().loss(values, targets, weights).metrics)["value_explained_variance"] == 0.0


def test_a_small_spread_far_from_0_is_not_lost() -> None:
    targets = 100.0 + torch.linspace(-1, 1, 1000) * 1e-2
    values = targets + 0.5 * (targets - 100.0) + 7.0  # an offset is forgiven
    found = CriticHead().metrics(CriticHead().loss(values, targets, torch.full((1000,), 1e-3)).metrics)
    assert found["value_explained_variance"] == pytest.approx(0.75, abs=0.01)
