"""Around a step: schedules, mini-batches and epochs, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.batch.sample import Sample
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.rows import Tally
from lightning.engines.step import NonFiniteError, StepDriver, minibatches
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, EngineError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient, SequencePolicyGradient
from lightning.losses.protocol import LossOutput, TokenBatch

LOSS = ClippedPolicyGradient(0.2, 0.28, correction=NO_CORRECTION)
Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]


def rows_of(make_row: Make, count: int, logprob: float = math.nan) -> list[Sample]:
    return [
        make_row(12, [(4, 8 + n % 5, 1.0 - 0.3 * n, 0.02 + 0.01 * n)], seed=n, name=f"r{n}", logprob=logprob)
        for n in range(count)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 3))
def test_parts_are_all_rows_once_and_each_weighs_what_all_do(
    make_row: Make, count: int, parts: int, epoch: int
) -> None:
    rows = rows_of(make_row, count)
    found = minibatches(rows, parts, (7, 3, epoch))
    assert len(found) == min(parts, count)
    names = [sample.spans[0].rollout for part in found for sample in part]
    assert sorted(names) == sorted(sample.spans[0].rollout for sample in rows)
    whole = sum(float(sample.weights.sum()) for sample in rows)
    for part in found:
        assert sum(float(sample.weights.sum()) for sample in part) == pytest.approx(whole, rel=1e-5)
        order = [names.index(sample.spans[0].rollout) for sample in part]
        assert order == sorted(order)
    again = minibatches(rows, parts, (7, 3, epoch))
    assert [[one.spans for one in part] for part in again] == [[one.spans for one in part] for part in found]


def test_passes_deal_the_rows_differently(make_row: Make) -> None:
    rows = rows_of(make_row, 8)
    deals = {
        tuple(tuple(sample.spans[0].rollout for sample in part) for part in minibatches(rows, 4, (0, step, epoch)))
        for step in range(2)
        for epoch in range(2)
    }
    assert len(deals) == 4


class Recorder:
    """A computer that notes what it is asked, and whose rows called `bad` are not finite."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def prepare(self, samples: Sequence[Sample], loss: object) -> Sequence[Sample]:
        self.said.append(f"prepare {len(samples)}")
        return samples

    def accumulate(self, samples: Sequence[Sample], loss: object, step: int) -> Tally:
        self.said.append(f"accumulate {len(samples)}")
        if any(sample.spans[0].rollout == "bad" for sample in samples):
            raise NonFiniteError("the loss is nan")
        tally = Tally()
        tally.parts = 1
        return tally

    def update(self, lr: float, step: int) -> dict[str, float]:
        self.said.append(f"update {lr:g}")
        return {"grad_norm": 2.0}


def driver(most: int = 3, **config: object) -> StepDriver:
    found = StepDriver(most)
    found.begin(OptimizerConfig(lr=0.5, **config), seed=0)  # type: ignore[arg-type]
    return found


def test_a_step_prepares_and_updates_for_each_part_of_each_pass(make_row: Make) -> None:
    recorder, own = Recorder(), driver(minibatches=2, epochs=3)
    metrics = own.step(recorder, rows_of(make_row, 4, logprob=-4.0), LOSS).metrics
    assert recorder.said == ["prepare 2", "accumulate 2", "update 0.5"] * 6
    assert (metrics["updates"], metrics["stepped"], metrics["grad_norm"], own.steps) == (6.0, 1.0, 2.0, 1)


def test_an_update_that_is_not_finite_is_left_out_and_the_others_are_taken(make_row: Make) -> None:
    recorder, own = Recorder(), driver(minibatches=4)
    rows = [*rows_of(make_row, 3), make_row(8, [(4, 8, 1.0, 0.1)], name="bad")]
    metrics = own.step(recorder, rows, LOSS).metrics
    assert (metrics["updates"], metrics["skipped_nonfinite"], metrics["stepped"], own.steps) == (3.0, 1.0, 1.0, 1)
    with pytest.raises(EngineError, match="the 2nd in a row"):
        driver(most=1, epochs=2).step(Recorder(), [rows[-1]], LOSS)


def test_a_correction_that_looks_back_to_the_steps_start_is_refused_with_several_updates(make_row: Make) -> None:
    loss = ClippedPolicyGradient(0.2, 0.28, correction=Correction("tis"))
    assert driver().step(Recorder(), rows_of(make_row, 2), loss).metrics["updates"] == 1.0
    with pytest.raises(ConfigError, match=r"'tis' .* engine.minibatches = 1"):
        driver(epochs=2).step(Recorder(), rows_of(make_row, 2), loss)


def test_a_loss_that_compares_rows_is_refused_with_minibatches(make_row: Make) -> None:
    class Pairs:
        whole_step = True

    assert driver(epochs=2).step(Recorder(), rows_of(make_row, 2), Pairs()).metrics["updates"] == 2.0
    with pytest.raises(ConfigError, match=r"Pairs compares the rows of a whole step.*engine.minibatches = 1"):
        driver(minibatches=2).step(Recorder(), rows_of(make_row, 2), Pairs())


def test_an_update_needs_a_gradient(make_row: Make) -> None:
    own, recorder = driver(), Recorder()
    with pytest.raises(EngineError, match=r"call forward_backward\(\)"):
        own.optim_step(recorder)
    own.forward_backward(recorder, rows_of(make_row, 2), LOSS)
    metrics = own.optim_step(recorder, lr=0.25).metrics
    assert (metrics["lr"], metrics["updates"], own.steps) == (0.25, 1.0, 1)
    with pytest.raises(EngineError, match=r"call forward_backward\(\)"):
        own.optim_step(recorder)


def test_a_gradient_that_failed_is_none(make_row: Make) -> None:
    own, recorder = driver(), Recorder()
    own.forward_backward(recorder, rows_of(make_row, 2), LOSS)
    with pytest.raises(NonFiniteError):
        own.forward_backward(recorder, [make_row(8, [(4, 8, 1.0, 0.1)], name="bad")], LOSS)
    with pytest.raises(EngineError, match=r"call forward_backward\(\)"):
        own.optim_step(recorder)
    own.forward_backward(recorder, rows_of(make_row, 2), LOSS)
    own.step(recorder, rows_of(make_row, 2), LOSS)
    with pytest.raises(EngineError, match=r"call forward_backward\(\)"):
        own.optim_step(recorder)


@pytest.mark.parametrize("rate", [None, 0.25])
def test_a_step_is_taken_at_the_rate_it_is_given(make_row: Make, rate: float | None) -> None:
    own = driver()
    recorder = Recorder()
    own.forward_backward(recorder, rows_of(make_row, 2), LOSS)
    assert own.optim_step(recorder, lr=rate).metrics["lr"] == (rate or 0.5)
    assert own.step(recorder, rows_of(make_row, 2), LOSS, rate).metrics["lr"] == (rate or 0.5)


def weights(engine: TorchEngine) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in engine._learning().values()])


def test_a_loop_of_ones_own_is_the_step(open_engine: Open, make_row: Make) -> None:
    """`forward_backward` in parts and one `optim_step` leave the weights that `step` leaves, to rounding."""
    rows = rows_of(make_row, 6)
    whole, parts = open_engine(dtype="float64"), open_engine(dtype="float64")
    before = weights(whole)
    whole.step(rows, LOSS)
    for part in (rows[:1], rows[1:4], rows[4:]):
        assert parts.forward_backward(part, LOSS).metrics["stepped"] == 0.0
    parts.optim_step()
    assert float((weights(whole) - before).norm()) > 0
    assert float((weights(whole) - weights(parts)).norm()) <= 1e-9 * float(weights(whole).norm())


def test_minibatches_and_epochs_are_their_updates_one_after_another(open_engine: Open, make_row: Make, model) -> None:
    rows = rows_of(make_row, 6, logprob=-4.0)
    config = OptimizerConfig(lr=1e-3, minibatches=3, epochs=2)
    engine, by_hand = TorchEngine(device="cpu", dtype="float64"), open_engine(dtype="float64")
    engine.open(model, config, seed=0)
    metrics = engine.step(rows, LOSS).metrics
    for epoch in range(2):
        for part in minibatches(rows, 3, (0, 0, epoch)):
            by_hand.forward_backward(part, LOSS)
            by_hand.optim_step(1e-3)
    assert torch.equal(weights(engine), weights(by_hand))
    assert metrics["updates"] == 6.0
    assert metrics["tokens"] == sum(int((sample.weights != 0).sum()) for sample in rows)
    engine.close()


def test_a_step_of_several_updates_is_taken_again_bit_for_bit(make_row: Make, model, tmp_path) -> None:
    config = OptimizerConfig(lr=1e-3, minibatches=2, epochs=2)
    rows = rows_of(make_row, 5)

    def opened() -> TorchEngine:
        engine = TorchEngine(device="cpu")
        engine.open(model, config, seed=3)
        return engine

    one, other = opened(), opened()
    one.step(rows, LOSS)
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert one.step(rows, LOSS, 5e-4).metrics == other.step(rows, LOSS, 5e-4).metrics
    assert torch.equal(weights(one), weights(other))
    one.close()
    other.close()


def test_memory_that_runs_out_in_a_later_part_costs_nothing_of_an_earlier_one(
    open_engine: Open, make_row: Make
) -> None:
    rows = rows_of(make_row, 4)
    calls = 0

    def short_once(batch: TokenBatch) -> LossOutput:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("planted")
        return LOSS(batch)

    whole, parts = open_engine(dtype="float64"), open_engine(dtype="float64")
    whole.forward_backward(rows, LOSS)
    whole.optim_step()
    parts.forward_backward(rows[:2], LOSS)
    parts.forward_backward(rows[2:], short_once)
    parts.optim_step()
    assert float((weights(whole) - weights(parts)).norm()) <= 1e-9 * float(weights(whole).norm())


def test_weights_of_float32_stay_float32(make_row: Make) -> None:
    for part in minibatches(rows_of(make_row, 3), 2, (0, 0, 0)):
        assert {sample.weights.dtype for sample in part} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "loss", [LOSS, SequencePolicyGradient(0.2, 0.28, correction=NO_CORRECTION)], ids=["token", "call"]
)
def test_without_the_samplers_logprobs_later_updates_are_clipped_at_the_policy_of_the_steps_start(
    open_engine: Open, make_row: Make, model: Path, loss: ClippedPolicyGradient
) -> None:
    """A grammar's tokens come without: as if the sampler had given just what the trainer says at the start."""
    rows, results = rows_of(make_row, 4), []
    start = open_engine(dtype="float64").logprobs(rows)
    known = [replace(row, logprobs=own) for row, own in zip(rows, start, strict=True)]
    mixed = [*known[:2], *rows[2:]]
    for sampled in (known, rows, mixed):
        engine = TorchEngine(device="cpu", dtype="float64")
        engine.open(model, OptimizerConfig(lr=1e-3, minibatches=2, epochs=3), seed=0)
        results.append((engine.step(sampled, loss).metrics, weights(engine)))
        engine.close()
    (expected, after), *others = results
    assert expected["clip_fraction_last"] > 0.1
    for found, theirs in others:
        assert found["clip_fraction_last"] == pytest.approx(expected["clip_fraction_last"])
        assert float((theirs - after).abs().max()) < 1e-4, "logprobs of a sampler are float32"
    shares = [metrics["old_logprob_share"] for metrics, _ in results]
    assert shares[:2] == [1.0, 0.0]
    assert 0.0 < shares[2] < 1.0, "they are not called the sampler's"
