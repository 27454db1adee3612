"""Distillation: what its loss is, what its batches are, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.algorithms.spec import make_algorithm, parse_algorithms
from lightning.batch.build import build_samples
from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group
from lightning.config import LoraConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch import engine as torch_engine
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, EngineError
from lightning.losses.correction import Correction
from lightning.losses.protocol import TokenBatch
from lightning.testing.tiny_models import make_tiny_model
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.trainer.algorithm import resolve_schedule
from lightning.trainer.runs import describe_algorithm, rebuild_algorithm
from lightning_finetuning.distill import Distill
from lightning_finetuning.distillation_loss import DistillationLoss

VOCAB = 320
LOGITS = st.lists(st.floats(-3.0, 3.0), min_size=5, max_size=5)


def tokens(logprobs: torch.Tensor, reference: torch.Tensor, weights: torch.Tensor, **changes: Any) -> TokenBatch:
    count = len(logprobs)
    made = TokenBatch(
        logprobs,
        old_logprobs=logprobs.detach().clone(),
        advantages=torch.full((count,), 7.0, dtype=logprobs.dtype),  # not looked at
        weights=weights,
        entropy=torch.zeros(count, dtype=logprobs.dtype),
        has_old=torch.ones(count, dtype=torch.bool),
        reference=reference,
    )
    return replace(made, **changes)


@settings(max_examples=60, deadline=None)
@given(student=LOGITS, teacher=LOGITS)
def test_its_gradient_is_that_of_the_reverse_kl(student: list[float], teacher: list[float]) -> None:
    """Over all tokens of a vocabulary, each as often as the student samples it."""
    logits = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    ours, theirs = logits.log_softmax(0), torch.tensor(teacher, dtype=torch.float64).log_softmax(0)
    exact = (ours.exp() * (ours - theirs)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    made = DistillationLoss()(tokens(ours, theirs, ours.detach().exp()))
    (found,) = torch.autograd.grad(made.loss, logits)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)
    value = exact.item()
    assert made.loss.item() == pytest.approx(value, abs=1e-10)
    assert made.metrics["teacher_kl"] == pytest.approx(value, abs=1e-10)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(2, 12))
def test_how_tokens_are_split_changes_nothing(data: st.DataObject, count: int) -> None:
    numbers = np.random.default_rng(data.draw(st.integers(0, 999)))
    logprobs, reference, old = (torch.tensor(-numbers.exponential(size=count), requires_grad=False) for _ in range(3))
    logprobs.requires_grad_(requires_grad=True)
    whole = tokens(logprobs, reference, torch.tensor(numbers.random(count)), old_logprobs=old)
    cut = data.draw(st.integers(1, count - 1))

    def part(own: slice) -> TokenBatch:
        names = ("logprobs", "old_logprobs", "advantages", "weights", "entropy", "has_old", "reference")
        return TokenBatch(**{name: getattr(whole, name)[own] for name in names})

    loss = DistillationLoss()
    pieces = [loss(part(own)) for own in (slice(0, cut), slice(cut, None))]
    (expected,) = torch.autograd.grad(loss(whole).loss, logprobs)
    (found,) = torch.autograd.grad(sum(piece.loss for piece in pieces), logprobs)
    torch.testing.assert_close(found, expected)
    assert sum(piece.metrics["teacher_kl"] for piece in pieces) == pytest.approx(loss(whole).metrics["teacher_kl"])


def test_what_is_too_old_is_masked_and_no_token_is_taken_without_a_teacher() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -9.0])
    batch = tokens(logprobs, torch.tensor([-2.0, -2.0]), torch.ones(2), old_logprobs=old)
    made = DistillationLoss()(batch)
    assert torch.autograd.grad(made.loss, logprobs)[0].tolist() == pytest.approx([1.0, 0.0])
    assert made.metrics["masked_share"] == 1.0
    with pytest.raises(EngineError, match="needs the teacher's logprobs"):
        DistillationLoss()(replace(batch, reference=None))


def test_rewards_play_no_part() -> None:
    algorithm = Distill("first@20", group_size=1)
    equal, alone = make_group([1.0, 1.0], group="equal"), make_group([0.3], group="alone")
    silent = Group("silent", tuple(replace(member, trainable=(False,)) for member in equal.trajectories))
    batch = algorithm.batch([equal, alone, silent, make_group([], group="empty")])
    assert [rollout.id for rollout in batch.used] == ["equal/0", "equal/1", "alone/0"]
    assert batch.skipped == {"nothing_to_train": 1, "too_few_succeeded": 1}
    other = algorithm.batch([make_group([0.0, 5.0], group="equal"), make_group([-1.0], group="alone")])
    for row, same in zip(batch.samples, other.samples, strict=True):
        np.testing.assert_array_equal(row.ids, same.ids)
        np.testing.assert_array_equal(row.weights, same.weights)
        assert not row.advantages.any()
    assert batch.loss_for(algorithm) == DistillationLoss()


@pytest.mark.parametrize(
    "text", ["distill:teacher=runs/first@20", "distill:teacher=Qwen/Qwen3-8B,group_size=1,correction=tis"]
)
def test_it_is_made_of_a_text_and_of_a_runs_record(text: str) -> None:
    made = make_algorithm(parse_algorithms(text)[0])
    assert isinstance(made, lightning.Distill)
    assert rebuild_algorithm({"algorithm": describe_algorithm(made)}) == made
    assert made.teacher in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"teacher": ""}, "needs a teacher: write distill:teacher=RUN@STEP"),
        ({"group_size": 0}, "group_size=0 must be positive"),
        ({"normalization": "constant"}, "normalization 'constant' is not one of"),
        ({"correction": "often"}, "unknown correction 'often'"),
        ({"correction": Correction(level="sequence")}, "weighs whole calls"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Distill(**{"teacher": "first@1", **arguments})


def test_a_teacher_is_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match="distillation needs a teacher"):
        resolve_schedule("distill")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "student", vocab=VOCAB)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another architecture and size."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    return make_tiny_model(folder, vocab=VOCAB, architecture="llama", hidden=128, layers=3, seed=5)


OpenTorch = Callable[..., TorchEngine]


@pytest.fixture
def open_torch(student: Path) -> Iterator[OpenTorch]:
    opened: list[TorchEngine] = []

    def make(reference: Path | None = None, *, folder: Path = student, **arguments: Any) -> TorchEngine:
        engine = TorchEngine(device="cpu", **arguments)
        opened.append(engine)
        engine.open(folder, OptimizerConfig(lr=3e-3), seed=0, **({"reference": reference} if reference else {}))
        return engine

    yield make
    for engine in opened:
        engine.close()


def rows() -> list[Sample]:
    """Two rollouts whose calls share their beginnings."""
    numbers = np.random.default_rng(0)
    shared = numbers.integers(0, VOCAB, 40).tolist()
    calls = [([*shared, place], numbers.integers(0, VOCAB, 6).tolist()) for place in range(4)]
    members = [make_trajectory(calls[part : part + 2], rollout=f"a/{part}", group="a") for part in (0, 2)]
    found = build_samples(members, [np.zeros(2)] * 2, normalization="token-mean")
    return [replace(row, logprobs=np.full_like(row.logprobs, np.nan)) for row in found]


def apart(engine: TorchEngine, other: TorchEngine, batch: list[Sample]) -> tuple[float, float]:
    """The mean of log p - log p_other over the trained tokens, and that of its square, down which the gradient leads on tokens
    that stay the same."""
    pairs = zip(batch, engine.logprobs(batch), other.logprobs(batch), strict=True)
    gaps = [(row.weights, np.nan_to_num(own - theirs)) for row, own, theirs in pairs]
    first, second = (sum(float((weights * gap**power).sum()) for weights, gap in gaps) for power in (1, 2))
    return first, second


@pytest.mark.parametrize("arguments", [{}, {"lora": LoraConfig(rank=4, alpha=8)}, {"step": "tree"}, {"step": "linear"}])
def test_the_engine_asks_the_teacher_whatever_it_is(
    open_torch: OpenTorch, teacher: Path, arguments: dict[str, Any]
) -> None:
    batch, engine, other = rows(), open_torch(teacher, **arguments), open_torch(folder=teacher)
    expected, before = apart(engine, other, batch)
    first = engine.step(batch, DistillationLoss()).metrics
    assert first["teacher_kl"] == pytest.approx(expected, abs=1e-4)
    assert first["loss"] == pytest.approx(expected, abs=1e-4)
    assert first["stepped"] == 1.0
    assert apart(engine, other, batch)[1] < before


def test_a_teacher_that_takes_no_tree_is_computed_row_by_row(
    open_torch: OpenTorch, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_torch(teacher, step="tree").step(rows(), DistillationLoss()).metrics
    original: Any = torch_engine.why_no_tree
    monkeypatch.setattr(
        torch_engine, "why_no_tree", lambda lm: "it has a window" if lm.folder == teacher else original(lm)
    )
    found = open_torch(teacher, step="tree").step(rows(), DistillationLoss()).metrics
    assert found["tree"] == expected["tree"] == 1.0
    for name in ("loss", "teacher_kl", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


def test_a_student_that_is_its_teacher_learns_nothing(open_torch: OpenTorch, student: Path) -> None:
    metrics = open_torch(student).step(rows(), DistillationLoss()).metrics
    assert (metrics["teacher_kl"], metrics["loss"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert metrics["grad_norm"] < 1e-5
    assert all(map(math.isfinite, metrics.values()))
