"""What a step does, reports, refuses and survives."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.batch import Sample, TokenSpan, build_samples, transition_digest
from lightning.batch.build import MAX_ADVANTAGE
from lightning.config import LoraConfig
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import DataError, EngineError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import LossOutput, TokenBatch
from lightning.testing.trajectories import make_call, make_trajectory
from transformers import GPT2Config, GPT2LMHeadModel

Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]
LOSS = ClippedPolicyGradient(correction=NO_CORRECTION)


def snapshot(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine._parameters.items()}


def assert_unchanged(engine: TorchEngine, before: dict[str, torch.Tensor]) -> None:
    for name, value in engine._parameters.items():
        assert torch.equal(value, before[name])
        assert value.grad is None


def on_policy(engine: TorchEngine, row: Sample) -> Sample:
    """The row with the engine's own logprobs as the sampler's."""
    values = np.where(row.weights != 0, engine.logprobs([row])[0], np.nan).astype(np.float32)
    return replace(row, logprobs=values)


def test_good_tokens_become_likelier_and_bad_ones_less(open_engine: Open, make_row: Make) -> None:
    engine = open_engine()
    row = on_policy(engine, make_row(12, [(2, 5, 1.0, 0.1), (8, 12, -1.0, 0.1)]))
    before = engine.logprobs([row])[0]
    for _ in range(3):
        engine.step([row], LOSS)
    after = engine.logprobs([row])[0]
    assert after[2:5].mean() > before[2:5].mean()
    assert after[8:12].mean() < before[8:12].mean()


def test_on_policy_the_gap_is_rounding_and_the_ratio_one(open_engine: Open, make_row: Make) -> None:
    engine = open_engine()
    rows = [
        on_policy(engine, make_row(n, [(3, n, 1.0, 0.1)], seed=n, name=f"r{n}", temperature=0.8)) for n in (5, 30, 9)
    ]
    metrics = engine.step(rows, LOSS).metrics
    assert metrics["max_logprob_gap"] < 1e-5
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["tokens_compared"] == metrics["tokens"] == 2 + 27 + 6
    assert metrics["tokens_forward"] >= 5 + 30 + 9


def test_rows_without_sampler_logprobs_are_trained_and_not_compared(open_engine: Open, make_row: Make) -> None:
    metrics = open_engine().step([make_row(8, [(4, 8, 1.0, 0.1)])], LOSS).metrics
    assert (metrics["tokens"], metrics["tokens_compared"]) == (4, 0)
    assert metrics["grad_norm"] > 0
    of_both = {"max_logprob_gap", "mean_logprob_gap", "p999_logprob_gap", "approx_kl", "ess", "ratio", "ratio_max"}
    assert not of_both & metrics.keys(), "what was not compared is not known"


def test_tokens_behind_the_last_trained_one_are_not_computed(open_engine: Open, make_row: Make) -> None:
    metrics = open_engine().step([make_row(500, [(4, 8, 1.0, 0.1)])], LOSS).metrics
    assert metrics["tokens_forward"] == 8


def test_seen_is_what_the_gateway_recorded(open_engine: Open) -> None:
    calls = [
        make_call((1, 2), (3, 4), rollout="r", seq=0),
        make_call((1, 2, 3, 4, 5), (6,), rollout="r", seq=1, logprob=None),
    ]
    trajectory = replace(make_trajectory([((1,), (2,))] * 2, rollout="r"), transitions=tuple(calls))
    (row,) = build_samples([trajectory], [[1.0, -1.0]])
    seen = open_engine().step([row], LOSS).seen
    assert seen == {call.key: transition_digest(call) for call in calls}


@pytest.mark.parametrize("what", ["ids", "logprobs"])
def test_seen_tells_a_changed_row(open_engine: Open, make_row: Make, what: str) -> None:
    row = make_row(8, [(4, 8, 1.0, 0.1)], logprob=-2.0)
    values = getattr(row, what).copy()
    values[5] = values[5] + 1
    engine = open_engine()
    assert engine.step([row], LOSS).seen != engine.step([replace(row, **{what: values})], LOSS).seen


def test_an_empty_batch_takes_no_step_and_says_so(open_engine: Open, make_row: Make) -> None:
    engine = open_engine()
    before = snapshot(engine)
    for samples in ([], [make_row(8, [])]):
        result = engine.step(samples, LOSS)
        assert (result.metrics["stepped"], result.metrics["tokens"], result.seen) == (0.0, 0.0, {})
        unknown = {"loss", "grad_norm", "lr", "entropy", "clip_fraction", "max_logprob_gap", "mean_logprob_gap"}
        assert not unknown & result.metrics.keys(), "a mean of nothing is not 0"
    assert_unchanged(engine, before)
    assert engine._driver.steps == 0


def test_a_step_has_the_rate_it_is_given_and_the_gradient_is_clipped(model: Path, make_row: Make) -> None:
    engine = TorchEngine(device="cpu")
    engine.open(model, OptimizerConfig(lr=1e-3, max_grad_norm=1e-3), seed=0)
    row = make_row(8, [(4, 8, 1.0, 1.0)])
    metrics = [engine.step([row], LOSS, rate).metrics for rate in (2.5e-4, 5e-4, None)]
    assert [values["lr"] for values in metrics] == [2.5e-4, 5e-4, 1e-3]
    assert metrics[0]["grad_norm"] > 1e-3  # as it was before clipping
    engine.close()


def test_weight_decay_spares_norms(model: Path, make_row: Make) -> None:
    engine = TorchEngine(device="cpu")
    engine.open(model, OptimizerConfig(lr=1e-2, weight_decay=0.5), seed=0)
    before = snapshot(engine)
    engine.step([make_row(8, [(4, 8, 0.0, 1.0)])], LOSS)  # no advantage: only decay moves the weights
    for name, value in engine._parameters.items():
        expected = before[name] * (1 - 0.005) if value.ndim >= 2 else before[name]
        torch.testing.assert_close(value.detach(), expected)
    engine.close()


def assert_skipped(result: StepResult) -> None:
    assert (result.metrics["skipped_nonfinite"], result.metrics["stepped"]) == (1.0, 0.0)
    assert all(map(math.isfinite, result.metrics.values()))


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(
    open_engine: Open, make_row: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(tokens_per_microbatch=8, step="linear")
    before = snapshot(engine)

    def broken(batch: TokenBatch) -> LossOutput:
        return LossOutput(batch.logprobs.sum() * (float("nan") if batch.advantages[0] > 1 else 1.0))

    rows = [make_row(8, [(4, 8, 1.0, 0.1)], name="fine"), make_row(8, [(4, 8, 2.0, 0.1)], name="culprit")]
    assert_skipped(engine.step(rows, broken))
    assert re.search(
        r"loss is nan at step 1 in 1 row of up to 8 tokens \(rollout culprit.*: the step is skipped", caplog.text
    )
    assert "(1 in a row; engine.max_nonfinite_steps = 3). If it happens again: lower engine.lr" in caplog.text
    assert_unchanged(engine, before)
    assert all(parameter.grad is None for parameter in engine._parameters.values()), "of the row that came first"


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(open_engine: Open, make_row: Make) -> None:
    engine = open_engine()
    before = snapshot(engine)

    def steep(batch: TokenBatch) -> LossOutput:
        return LossOutput((batch.logprobs - batch.logprobs.detach()).sum().sqrt())  # 0, with an infinite slope

    assert_skipped(engine.step([make_row(8, [(4, 8, 1.0, 0.1)])], steep))
    assert_unchanged(engine, before)
    taken = engine.step([make_row(8, [(4, 8, 1.0, 0.1)])], LOSS).metrics
    assert (taken["stepped"], taken["skipped_nonfinite"]) == (1.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_so_many_steps_in_a_row_may_be_skipped_and_one_that_is_taken_begins_anew(
    open_engine: Open, make_row: Make, value: float
) -> None:
    engine, rows = open_engine(max_nonfinite_steps=2), [make_row(8, [(4, 8, 1.0, 0.1)])]
    before = snapshot(engine)

    def broken(batch: TokenBatch) -> LossOutput:
        return LossOutput((batch.logprobs * value).sum())

    for _ in range(2):
        assert_skipped(engine.step(rows, broken))
    assert_unchanged(engine, before)
    assert engine.step(rows, LOSS).metrics["stepped"] == 1.0
    for _ in range(2):
        assert_skipped(engine.step(rows, broken))
    with pytest.raises(EngineError, match=r"3rd in a row, more than engine\.max_nonfinite_steps = 2"):
        engine.step(rows, broken)


def test_a_skipped_step_leaves_moments_alone(model: Path, make_row: Make) -> None:
    """The step after it is bit for bit the one that would have been taken in its place."""
    rows, engines = [make_row(8, [(4, 8, 1.0, 0.1)])], []
    for skipping in (False, True):
        engine = TorchEngine(device="cpu")
        engine.open(model, OptimizerConfig(lr=1e-2), seed=0)
        engine.step(rows, LOSS)
        if skipping:
            assert_skipped(engine.step(rows, lambda batch: LossOutput(batch.logprobs.sum() * math.nan)))
        engine.step(rows, LOSS)
        engines.append(snapshot(engine))
        engine.close()
    for name, value in engines[0].items():
        assert torch.equal(value, engines[1][name]), name


def test_weights_that_a_huge_rate_made_infinite_end_the_run_with_the_cure(model: Path, make_row: Make) -> None:
    engine, rows = TorchEngine(device="cpu", max_nonfinite_steps=1), [make_row(8, [(4, 8, 1.0, 0.1)])]
    engine.open(model, OptimizerConfig(lr=1e38), seed=0)
    assert engine.step(rows, LOSS).metrics["stepped"] == 1.0
    assert_skipped(engine.step(rows, LOSS))
    with pytest.raises(EngineError, match=r"2nd in a row.* \(lower engine\.lr .* from an earlier checkpoint"):
        engine.step(rows, LOSS)
    engine.close()


def test_the_largest_advantage_has_a_finite_gradient_and_one_beyond_is_named(
    open_engine: Open, make_row: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine()
    assert engine.step([make_row(8, [(4, 8, MAX_ADVANTAGE, 1.0)])], LOSS).metrics["stepped"] == 1.0
    before = snapshot(engine)
    rows = [make_row(8, [(4, 8, 1.0, 0.1)], name="fine"), make_row(8, [(4, 8, -1e30, 0.1)], name="culprit")]
    assert_skipped(engine.step(rows, LOSS))
    assert re.search(r"gradient is not finite .* \(the largest advantage is 1e\+30, in rollout culprit", caplog.text)
    assert_unchanged(engine, before)


def small_memory(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    trunk = engine._opened().model.model
    forward = trunk.forward

    def limited(*args: object, **kwargs: torch.Tensor) -> object:
        if kwargs["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(trunk, "forward", limited)


def test_out_of_memory_halves_the_microbatch_and_goes_on(
    open_engine: Open, make_row: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [make_row(16, [(4, 16, 1.0, 0.1)], seed=seed, name=f"r{seed}") for seed in range(8)]
    roomy, tight = open_engine(), open_engine()
    small_memory(tight, monkeypatch, 40)
    expected = roomy.step(rows, LOSS)
    with caplog.at_level(logging.WARNING):
        result = tight.step(rows, LOSS)
    assert "out of memory: going on with" in caplog.text
    assert result.metrics["microbatches"] == 4
    assert result.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert result.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4, abs=1e-6)
    assert result.seen == expected.seen
    caplog.clear()
    tight.step(rows, LOSS)
    assert not caplog.records  # the smaller size is kept


def test_a_single_row_that_does_not_fit_names_the_cures(
    open_engine: Open, make_row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    small_memory(engine, monkeypatch, 10)
    before = snapshot(engine)
    with pytest.raises(EngineError, match=r"single row of 16 tokens: set engine\.gradient_checkpointing"):
        engine.step([make_row(16, [(4, 16, 1.0, 0.1)])], LOSS)
    assert_unchanged(engine, before)


class Fails(torch.autograd.Function):
    """The identity, whose backward pass raises `error` on more than `tokens` tokens."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, tokens: int, error: Exception) -> torch.Tensor:
        ctx.tokens, ctx.error = tokens, error
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if len(grad) > ctx.tokens:
            raise ctx.error
        return grad, None, None


def failing_backward(tokens: int, error: Exception) -> Callable[[TokenBatch], LossOutput]:
    return lambda batch: LOSS(replace(batch, logprobs=Fails.apply(batch.logprobs, tokens, error)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    ],
    ids=["torch", "driver", "cublas", "cpu"],
)
def test_out_of_memory_in_the_backward_pass_halves_the_microbatch_too(
    open_engine: Open, make_row: Make, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    rows = [make_row(16, [(4, 16, 1.0, 0.1)], seed=seed, name=f"r{seed}") for seed in range(8)]
    expected = open_engine().step(rows, LOSS)
    engine = open_engine(tokens_per_microbatch=128)
    with caplog.at_level(logging.WARNING):
        result = engine.step(rows, failing_backward(2 * 12, error))
    assert caplog.text.count("out of memory: going on with") == 2
    assert result.metrics["microbatches"] == 4
    assert result.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert result.seen == expected.seen


def test_out_of_memory_in_the_backward_pass_of_one_row_names_the_cures(open_engine: Open, make_row: Make) -> None:
    engine = open_engine()
    before = snapshot(engine)
    with pytest.raises(EngineError, match=r"single row of 16 tokens: set engine\.gradient_checkpointing"):
        engine.step([make_row(16, [(4, 16, 1.0, 0.1)])], failing_backward(0, torch.OutOfMemoryError("out of memory")))
    assert_unchanged(engine, before)


def test_out_of_memory_where_the_moments_are_made_names_the_cures_and_leaves_no_gradient(
    open_engine: Open, make_row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, row = open_engine(), make_row(16, [(4, 16, 1.0, 0.1)])
    before = snapshot(engine)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(torch, "zeros_like", full)
    cures = r"resume the run; .*gpu_memory_utilization.*engine\.lora"
    with pytest.raises(EngineError, match=rf"out of memory while taking step 1: .*{cures}"):
        engine.step([row], LOSS)
    assert_unchanged(engine, before)


def test_a_backward_pass_that_fails_is_an_engine_error_and_nothing_is_trained(
    open_engine: Open, make_row: Make
) -> None:
    engine = open_engine()
    before = snapshot(engine)
    row = make_row(16, [(4, 16, 1.0, 0.1)], name="culprit")
    with pytest.raises(EngineError, match=r"backward pass failed on 1 row of up to 16 .*rollout culprit.* device-side"):
        engine.step([row], failing_backward(0, RuntimeError("CUDA error: device-side assert triggered")))
    assert_unchanged(engine, before)
    with pytest.raises(EngineError, match=r"backward pass failed .* does not require grad"):
        engine.step([row], lambda batch: LossOutput(batch.logprobs.detach().sum()))
    assert engine.step([row], LOSS).metrics["stepped"] == 1.0


ROW = Sample(
    np.array([1, 2, 3, 4], np.int32),
    np.array([0, 0, 0, 1], np.float32),
    np.array([0, 0, 0, 1], np.float32),
    np.full(4, np.nan, np.float32),
    np.zeros(4, np.int32),
    (TokenSpan("r9", 2, 3, 3, 4),),
)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            replace(ROW, ids=np.array([1, 2, 3, 320], np.int32)),
            "id 320 .*call 3, is outside the model's vocabulary of 320",
        ),
        (replace(ROW, ids=np.array([1, -5, 3, 4], np.int32)), "token id -5"),
        (replace(ROW, weights=ROW.weights[:3]), "differ in length"),
        (replace(ROW, weights=np.array([1, 0, 0, 1], np.float32)), "first token has a weight"),
        (replace(ROW, weights=np.array([0, 0, 0, np.nan], np.float32)), "not finite"),
        (replace(ROW, advantages=np.full(4, np.inf, np.float32)), "not finite"),
        (replace(ROW, logprobs=np.full(4, -np.inf, np.float32)), "logprob is infinite"),
        (replace(ROW, temperature=0.0), "temperature is 0.0"),
        (replace(ROW, spans=(TokenSpan("r9", 2, 3, 3, 9),)), "span does not lie inside"),
    ],
)
def test_a_broken_row_is_named_and_nothing_is_trained(open_engine: Open, row: Sample, problem: str) -> None:
    engine = open_engine()
    before = snapshot(engine)
    with pytest.raises(DataError, match=problem) as caught:
        engine.step([ROW, row], LOSS)
    assert "rollout r9 attempt 2 call 3" in str(caught.value)
    assert_unchanged(engine, before)


def test_an_id_outside_the_vocabulary_names_the_call_that_brought_it(open_engine: Open, make_row: Make) -> None:
    row = make_row(12, [(2, 4, 1.0, 0.1), (6, 8, 1.0, 0.1), (10, 12, 1.0, 0.1)], name="r9")
    row.ids[5] = 999  # in the prompt of call 1
    with pytest.raises(DataError, match=r"rollout r9 .* token id 999 at index 5, first in call 1,"):
        open_engine().step([row], LOSS)


def test_bfloat16_keeps_float32_masters(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine, exact = open_engine(dtype="bfloat16", lr=1e-6), open_engine()
    row = make_row(12, [(4, 12, 1.0, 0.1)])
    gap = np.nanmax(np.abs(engine.logprobs([row])[0] - exact.logprobs([row])[0]))
    assert 0 < gap < 0.3
    before = snapshot(engine)
    engine.step([row], LOSS)
    moved = {name: (value.detach() - before[name]).abs().max() for name, value in engine._parameters.items()}
    assert {value.dtype for value in engine._parameters.values()} == {torch.float32}
    assert max(moved.values()) > 0  # in bfloat16 a change of 1e-6 would have vanished


def test_adapters_have_no_dropout(open_engine: Open, make_row: Make) -> None:
    """A dropped unit would make the trainer's logprobs, and so the gradient, depend on chance and on the micro-batches."""
    assert "dropout" not in LoraConfig.model_fields
    engine = open_engine(lora=LoraConfig(rank=4), lr=1e-2, gradient_checkpointing=True)  # which needs training mode
    engine.step([make_row(12, [(4, 12, 1.0, 0.1)])], LOSS)
    row = on_policy(engine, make_row(12, [(4, 12, 1.0, 0.1)]))
    assert engine.step([row], LOSS).metrics["max_logprob_gap"] < 1e-5


def test_the_models_own_dropout_is_silent(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    assert config.resid_pdrop == config.attn_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    engine = open_engine(tmp_path, gradient_checkpointing=True)  # which needs training mode
    assert engine.step([on_policy(engine, make_row(12, [(4, 12, 1.0, 0.1)]))], LOSS).metrics["max_logprob_gap"] < 1e-5


def test_gradient_checkpointing_changes_nothing(open_engine: Open, make_row: Make) -> None:
    row = make_row(12, [(4, 12, 1.0, 0.1)])
    one, other = open_engine().step([row], LOSS), open_engine(gradient_checkpointing=True).step([row], LOSS)
    assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-5)
