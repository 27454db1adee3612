"""The bound of the gap between trainer and sampler, by dtype."""

from __future__ import annotations

import math

import numpy as np
import pytest
from lightning.engines.logprob_gap import GapBound, allowed_outliers, bound_for, quantile
from lightning.engines.rows import gap_metrics


def test_the_bound_is_that_of_the_coarsest_dtype() -> None:
    assert bound_for("float32", "float32") == bound_for("float32", "float64")
    assert bound_for("float32", "bfloat16") == bound_for("bfloat16")
    assert bound_for("bfloat16").mean > bound_for("float32").mean


@pytest.mark.parametrize(
    ("dtype", "gaps", "message"),
    [
        ("float32", np.full(96, 9e-4), ""),
        ("float32", np.append(np.zeros(95), 2e-3), "0.002 nats or more on 1 of 96 tokens, more than 0.001"),
        ("bfloat16", np.append(np.full(2000, 0.03), 5.0), ""),  # one token in a thousand may be anywhere
        (
            "bfloat16",
            np.append(np.full(928, 0.01), 0.743),
            "",
        ),  # the largest of few tokens says nothing of one in a thousand
        ("bfloat16", np.append(np.zeros(923), np.full(6, 0.743)), ""),
        (
            "bfloat16",
            np.append(np.zeros(922), np.full(7, 0.743)),
            "0.743 nats or more on 7 of 929 tokens, more than 0.6",
        ),
        ("bfloat16", np.full(96, 0.06), ""),  # the mean of few is not that of all
        ("bfloat16", np.full(96, 0.07), "0.07 nats in the mean of 96 tokens, more than 0.0653"),
        ("bfloat16", np.full(9600, 0.06), "0.06 nats in the mean of 9600 tokens, more than 0.0515"),
        ("bfloat16", np.array([0.0, np.nan]), "nan nats in the mean of 2 tokens, more than 0.156"),
        ("bfloat16", np.zeros(0), ""),
    ],
)
def test_what_exceeds_a_bound_is_named(dtype: str, gaps: np.ndarray, message: str) -> None:
    assert bound_for(dtype).problem_of(gaps) == message


def test_a_quantile_of_few_tokens_is_what_they_can_say() -> None:
    gaps = np.arange(2000.0)
    assert quantile(gaps, 1.0) == 1999
    assert 1720 < quantile(gaps, 0.9) < 1799
    assert quantile(gaps[:14], 0.5) == 0
    assert quantile(gaps[:13], 0.5) is None, "each of thirteen may be in the upper half by chance"
    assert quantile(gaps[:1], 0.999) is None
    assert quantile(gaps[:1], 1.0) == 0


def test_a_single_token_says_nothing_of_one_in_a_thousand() -> None:
    bound = GapBound(mean=0.5, most=0.6, share=0.999)
    assert bound.problem_of(np.array([0.7])) == ""
    assert bound.problem_of(np.array([0.7, 0.7])) == "0.7 nats or more on 2 of 2 tokens, more than 0.6"
    step = gap_metrics(np.array([0.7]))
    assert step == {"max_logprob_gap": 0.7, "mean_logprob_gap": 0.7}
    assert bound.problem_of_step(step | {"tokens_compared": 1.0}) == ""
    every = GapBound(mean=0.5, most=0.6, share=1.0)
    assert every.problem_of_step(step | {"tokens_compared": 1.0}) == "0.7 nats or more on 1 of 1 tokens, more than 0.6"


@pytest.mark.parametrize("tokens", [1, 2, 64, 929, 5000, 200_000])
def test_tokens_that_keep_to_a_bound_hardly_ever_seem_beyond_it(tokens: int) -> None:
    """One in a thousand is beyond: 20,000 steps of so many tokens say so at most as often as `CHANCE` allows."""
    seen = np.random.default_rng(0).binomial(tokens, 1e-3, 20_000)
    assert np.sum(seen > allowed_outliers(tokens, 0.999)) <= 8
    assert allowed_outliers(tokens, 0.999) <= tokens * 1e-3 + 4 * math.sqrt(tokens * 1e-3) + 4, (
        "no more than that is allowed for"
    )
