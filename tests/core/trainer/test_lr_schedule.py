"""The learning rate of each step of a run."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.config import Config, with_settings
from lightning.trainer.model import EARLIER_STEPS, lr_share, rate_of


def settings(kind: str, steps: int, warmup: int = 0, lowest: float = 0.0) -> Config:
    changes = {"engine.lr_schedule": kind, "engine.warmup_steps": warmup, "engine.min_lr_ratio": lowest}
    return with_settings(Config(), {**changes, "trainer.steps": steps, "engine.lr": 0.5})


@given(st.integers(0, 20), st.integers(1, 100), st.floats(0, 1), st.sampled_from(["constant", "linear", "cosine"]))
def test_rates_rise_then_fall_to_the_lowest_share(warmup: int, left: int, lowest: float, kind: str) -> None:
    config = settings(kind, warmup + left, warmup, lowest)
    shares = [lr_share(config, step) for step in range(1, warmup + left + 4)]
    assert shares[:warmup] == pytest.approx([step / warmup for step in range(1, warmup + 1)])
    assert shares[warmup] == 1.0
    falling = shares[warmup:]
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(falling))
    assert shares[-1] == pytest.approx(1.0 if kind == "constant" else lowest)


@pytest.mark.parametrize(("earlier", "warmup"), [(40, 0), (40, 3), (2, 5)])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_of_a_fork_falls_over_its_own_steps(kind: str, earlier: int, warmup: int) -> None:
    config = settings(kind, 10, warmup)
    shares = [lr_share(config, step, earlier) for step in range(1, 11)]
    rising = max(0, warmup - earlier)  # the rest of the other run's warm-up
    assert shares[rising] == 1.0
    assert all(one > other > 0.0 for one, other in itertools.pairwise(shares[rising:]))
    assert lr_share(config, 11, earlier) == pytest.approx(0.0)
    assert rate_of(config, {EARLIER_STEPS: earlier}, rising + 1) == 0.5


def test_half_way_a_cosine_is_at_the_middle() -> None:
    config = settings("cosine", 10, lowest=0.1)
    assert lr_share(config, 6) == pytest.approx(0.55)
    assert lr_share(settings("linear", 10, lowest=0.1), 6) == pytest.approx(0.55)
    assert lr_share(config, 3) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)))
