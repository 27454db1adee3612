"""Losses of a whole step: what they are shown, how often, what becomes of it, and what is said when they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch import Sample
from lightning.config import LoraConfig
from lightning.engines.rows import Read, trained_tokens
from lightning.engines.step import prepared
from lightning.engines.torch import layouts
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, DataError, EngineError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import LossOutput, StepTokens, TokenBatch

Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]
PLAIN = ClippedPolicyGradient(correction=NO_CORRECTION)
VOCAB = 320


@dataclass
class Watching:
    """A whole-step loss that keeps what it is shown. Each token's number is 1 + its call's place among the step's calls."""

    needs_reference: bool = False
    needs_top_logprobs: int | None = None
    answer: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers
    steps: list[StepTokens] = field(default_factory=list)
    batches: list[TokenBatch] = field(default_factory=list)

    def prepare(self, step: StepTokens) -> np.ndarray:
        self.steps.append(step)
        return self.answer(1.0 + step.calls)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        self.batches.append(batch)
        assert batch.prepared is not None
        return LossOutput(-(batch.weights * batch.prepared * batch.logprobs).sum())


def two_rows(make_row: Make) -> list[Sample]:
    """A short row, then a longer one of two calls, whose second was sampled by version 3."""
    short = make_row(8, [(4, 8, 1.0, 0.5)], seed=1, name="short", temperature=0.7)
    long = make_row(14, [(3, 6, 2.0, 0.25), (9, 14, -1.0, 0.125)], seed=2, name="long", logprob=-2.0)
    long.versions[9:14] = 3
    return [short, long]


@pytest.mark.parametrize("kind", ["linear", "tree", "per-call"])
def test_it_sees_every_token_once_in_the_order_of_the_rows(open_engine: Open, make_row: Make, kind: str) -> None:
    loss, (short, long) = Watching(needs_reference=True, needs_top_logprobs=VOCAB), two_rows(make_row)
    engine = open_engine(step=kind)
    now = [values[row.weights != 0] for row, values in zip((short, long), engine.logprobs([short, long]), strict=True)]
    engine.step([short, long], loss)
    (step,) = loss.steps
    np.testing.assert_allclose(step.logprobs, np.concatenate(now), atol=1e-5)
    np.testing.assert_allclose(step.reference, step.logprobs, atol=1e-5)
    assert step.top_logprobs is not None
    assert step.top_ids is not None
    np.testing.assert_allclose(np.exp(step.top_logprobs).sum(-1), 1.0, rtol=1e-5)
    assert (np.diff(step.top_logprobs) <= 0).all()
    ids = np.concatenate([row.ids[row.weights != 0] for row in (short, long)])
    places = np.argmax(step.top_ids == ids[:, None], axis=-1)
    assert np.array_equal(step.top_logprobs[np.arange(len(ids)), places], step.logprobs)
    trained = sorted(tuple(row) for batch in loss.batches for row in batch.top_ids.tolist())  # type: ignore[union-attr]
    assert trained == sorted(map(tuple, step.top_ids.tolist()))
    np.testing.assert_allclose(step.old_logprobs, np.concatenate([now[0], np.full(8, -2.0)]), atol=1e-5)
    assert step.calls.tolist() == [0] * 4 + [1] * 3 + [2] * 5
    assert [(span.rollout, span.seq) for span in step.spans] == [("short", 0), ("long", 0), ("long", 1)]
    assert step.versions.tolist() == [0] * 7 + [3] * 5
    assert step.advantages.tolist() == [1.0] * 4 + [2.0] * 3 + [-1.0] * 5
    assert step.weights.tolist() == [0.5] * 4 + [0.25] * 3 + [0.125] * 5


@pytest.mark.parametrize("kind", ["linear", "tree", "per-call"])
def test_each_token_finds_what_was_said_of_it(open_engine: Open, make_row: Make, kind: str) -> None:
    loss = Watching()
    open_engine(step=kind).step(two_rows(make_row), loss)
    assert loss.batches[0].reference is None
    seen = sorted(
        (float(prepared), float(weight), int(version))
        for batch in loss.batches
        for prepared, weight, version in zip(batch.prepared, batch.weights, batch.versions, strict=True)  # type: ignore[arg-type]
    )
    assert seen == [(1.0, 0.5, 0)] * 4 + [(2.0, 0.25, 0)] * 3 + [(3.0, 0.125, 3)] * 5


def test_a_loss_of_single_tokens_costs_no_further_pass(
    open_engine: Open, make_row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = open_engine(), []

    def loss(batch: TokenBatch) -> LossOutput:
        seen.append(batch)
        return PLAIN(batch)

    def refuse(*_: object) -> None:
        raise AssertionError("a pass without a gradient")

    monkeypatch.setattr("lightning.engines.torch.engine.read_logprobs", refuse)
    engine.step(two_rows(make_row), loss)
    assert seen[0].prepared is None
    assert seen[0].reference is None
    assert sorted(seen[0].versions.tolist()) == [0] * 7 + [3] * 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "tree"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_runs_out_before_or_after_prepare_halves_the_microbatch_and_goes_on(
    open_engine: Open,
    make_row: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    when: str,
) -> None:
    rows = [make_row(64, [(4, 64, 1.0, 0.1)], seed=seed, name=f"r{seed}") for seed in range(8)]
    expected = open_engine(step=kind).step(rows, Watching())
    engine, loss, original = open_engine(step=kind, tokens_per_microbatch=512), Watching(), layouts.token_logprobs

    def limited(hidden: torch.Tensor, *arguments: object) -> object:
        if len(hidden) > 2 * 60 and (bool(loss.steps) == (when == "after")):
            raise torch.OutOfMemoryError("out of memory")
        return original(hidden, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(layouts, "token_logprobs", limited)
    with caplog.at_level(logging.WARNING):
        result = engine.step(rows, loss)
    assert caplog.text.count("out of memory: going on with") == 2
    assert len(loss.steps) == 1
    assert result.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert result.metrics["tokens"] == 8 * 60
    assert result.seen == expected.seen


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda numbers: numbers[:-1], r"Watching\.prepare gave an array of shape \(11,\) for 12 tokens"),
        (lambda numbers: numbers[:, None], r"Watching\.prepare gave an array of shape \(12, 1\)"),
        (
            lambda numbers: np.where(numbers == 3.0, np.nan, numbers),
            r"Watching\.prepare gave nan for token 0 of rollout long attempt 1 call 1 \(and 4 more\), so this update was not",
        ),
        (lambda numbers: numbers / 0.0, r"Watching\.prepare gave inf for token 0 of rollout short"),
    ],
    ids=["short", "column", "nan", "inf"],
)
def test_a_wrong_answer_names_the_loss_and_nothing_is_trained(
    open_engine: Open, make_row: Make, answer: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    engine = open_engine(max_nonfinite_steps=0)
    before = {name: value.detach().clone() for name, value in engine._parameters.items()}
    with pytest.raises(EngineError, match=message), np.errstate(divide="ignore"):
        engine.step(two_rows(make_row), Watching(answer=answer))
    assert all(torch.equal(value, before[name]) for name, value in engine._parameters.items())
    assert all(value.grad is None for value in engine._parameters.values())
    assert engine.step(two_rows(make_row), Watching()).metrics["stepped"] == 1.0


def test_a_weight_outside_all_calls_is_refused(open_engine: Open, make_row: Make) -> None:
    row = two_rows(make_row)[1]
    with pytest.raises(DataError, match=r"rollout long .* weight on a token that belongs to none of its calls"):
        open_engine().step([replace(row, spans=row.spans[:1])], Watching())


class ToReference:
    """Squared distance to the reference; keeps how far tokens were from it."""

    needs_reference = True

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def __call__(self, batch: TokenBatch) -> LossOutput:
        assert batch.reference is not None
        assert not batch.reference.requires_grad
        gap = batch.reference - batch.logprobs
        self.gaps = gap.detach().tolist()
        return LossOutput((batch.weights * gap.square()).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [{}, {"dtype": "bfloat16"}, {"step": "tree"}, {"lora": LoraConfig(rank=4)}, {"gradient_checkpointing": True}],
    ids=["full", "bfloat16", "tree", "adapters", "checkpointing"],
)
def test_the_reference_is_the_first_model_also_after_a_resume(
    open_engine: Open, make_row: Make, tmp_path: Path, arguments: dict[str, object]
) -> None:
    engine, rows, loss = open_engine(lr=1e-2, **arguments), two_rows(make_row), ToReference()
    engine.step(rows, loss)
    assert set(loss.gaps) == {0.0}, "to the last bit"
    start = engine.logprobs(rows)
    engine.step(rows, PLAIN)
    engine.save(tmp_path / "state")
    for trained in (engine, open_engine(lr=1e-2, **arguments)):
        trained.load(tmp_path / "state")
        now = trained.logprobs(rows)
        trained.step(rows, loss)
        moved = np.concatenate(
            [(then - value)[row.weights != 0] for then, value, row in zip(start, now, rows, strict=True)]
        )
        np.testing.assert_allclose(sorted(loss.gaps), sorted(moved), atol=3e-2 if "dtype" in arguments else 1e-5)
        assert np.abs(moved).max() > 0.1


def test_adapters_cost_no_second_model_and_go_on_learning(open_engine: Open, make_row: Make) -> None:
    engine = open_engine(lora=LoraConfig(rank=4), lr=1e-2)
    rows = two_rows(make_row)
    names = list(engine._parameters)
    for _ in range(2):
        engine.step(rows, PLAIN)
        engine.step(rows, ToReference())
    assert engine._reference is not None
    assert engine._reference._copy is None
    assert list(engine._opened().trainable()) == names
    before = engine.logprobs(rows)[0]
    assert engine.step(rows, PLAIN).metrics["grad_norm"] > 0
    assert not np.array_equal(before, engine.logprobs(rows)[0], equal_nan=True)


def test_a_reference_that_memory_has_no_room_for_names_the_cures(
    open_engine: Open, make_row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(
        EngineError, match=r"out of memory while loading the reference model, .*second copy.*engine\.lora"
    ):
        engine.step(two_rows(make_row), ToReference())


def test_a_reference_whose_folder_is_gone_is_named(
    open_engine: Open, make_row: Make, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    engine = open_engine(folder)
    (folder / "config.json").unlink()
    with pytest.raises(EngineError, match="is not a model folder"):
        engine.step(two_rows(make_row), ToReference())


def test_a_loss_that_needs_entropies_of_an_engine_without_them_is_told(make_row: Make) -> None:
    class Doubts:
        def prepare(self, step: StepTokens) -> np.ndarray:
            return step.entropy > 1.0  # type: ignore[operator]

        def __call__(self, batch: TokenBatch) -> LossOutput:
            return PLAIN(batch)

    rows = two_rows(make_row)
    tokens = trained_tokens(rows)
    numbers = np.full(len(tokens), -1.0, np.float32)
    with pytest.raises(
        ConfigError, match=r"prepare of the loss Doubts failed .* step\.entropy only by the engine torch"
    ):
        prepared(Doubts(), rows, tokens, lambda: Read(numbers), lambda: numbers)
    found = prepared(Doubts(), rows, tokens, lambda: Read(numbers, numbers + 3), lambda: numbers)
    assert found[0].prepared is not None
