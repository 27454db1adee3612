"""The bound of the gap between trainer and sampler, by dtype."""

from __future__ import annotations

import numpy as np
import pytest
from lightning.engines.logprob_gap import bound_for, quantile


def test_the_bound_is_that_of_the_coarsest_dtype() -> None:
    assert bound_for("float32", "float32") == bound_for("float32", "float64")
    assert bound_for("float32", "bfloat16") == bound_for("bfloat16")
    assert bound_for("bfloat16").mean > bound_for("float32").mean


@pytest.mark.parametrize(
    ("dtype", "gaps", "message"),
    [
        ("float32", np.full(96, 9e-4), ""),
        ("float32", np.append(np.zeros(95), 2e-3), "0.002 nats for 100.0% of 96 tokens, more than 0.001"),
        ("bfloat16", np.append(np.full(2000, 0.03), 5.0), ""),  # one token in a thousand may be anywhere
        ("bfloat16", np.append(np.zeros(500), 0.7), "0.7 nats for 99.9% of 501 tokens, more than 0.6"),
        ("bfloat16", np.full(96, 0.06), "0.06 nats in the mean of 96 tokens, more than 0.05"),
        ("bfloat16", np.array([0.0, np.nan]), "nan nats in the mean of 2 tokens, more than 0.05"),
        ("bfloat16", np.zeros(0), ""),
    ],
)
def test_what_exceeds_a_bound_is_named(dtype: str, gaps: np.ndarray, message: str) -> None:
    assert bound_for(dtype).exceeded(gaps) == message


def test_a_quantile_is_one_of_the_gaps() -> None:
    gaps = np.arange(2000.0)
    assert (quantile(gaps, 0.9), quantile(gaps, 1.0), quantile(gaps[:1], 0.5), quantile(gaps[:0], 0.5)) == (
        1799,
        1999,
        0,
        0,
    )
