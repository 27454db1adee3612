"""A user's own loss that compares with the reference model, prepares for a step, or is a whole loss, through the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import SFT
from lightning.algorithms import Batch, Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm
from lightning.batch.trajectory import Group
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, EngineError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import Loss, LossOutput, StepLoss, StepTokens, TokenBatch, needs_reference
from lightning.testing.tiny_models import make_tiny_model
from lightning.testing.trajectories import make_group
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import batch_digest

GROUP = make_group([0.0, 1.0, 0.5], calls=(((1, 2, 3), (4, 5)),))


def anchored(tokens: TokenBatch) -> torch.Tensor:
    """A term against the reference."""
    assert tokens.reference is not None
    return (tokens.logprobs - tokens.reference - 0.5).square()


@dataclasses.dataclass(frozen=True, slots=True)
class Anchored:
    """Says itself that it compares with the reference."""

    needs_reference: bool = True

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        return anchored(tokens)


def plain(tokens: TokenBatch) -> torch.Tensor:
    return -tokens.advantages * tokens.logprobs


class Prepared:
    """Each token's loss is scaled by what was prepared for it."""

    needs_reference = True

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor
        self.steps: list[StepTokens] = []

    def prepare(self, step: StepTokens) -> np.ndarray:
        self.steps.append(step)
        return np.full(len(step.logprobs), self.factor)

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        assert tokens.prepared is not None
        return -tokens.prepared * tokens.logprobs


def with_loss(loss: object) -> Algorithm:
    """The same rows, with a loss that belongs to the algorithm."""

    @from_batch(loss=loss)  # type: ignore[call-overload]
    def mine(groups: Sequence[Group]) -> Batch:
        return rows(groups)

    return mine()  # type: ignore[no-any-return]


def bringing(loss: object) -> Algorithm:
    """The same rows, with a loss that a batch brings along."""

    @from_batch
    def mine(groups: Sequence[Group]) -> Batch:
        return rows(groups, loss)

    return mine()


def rows(groups: Sequence[Group], loss: object = None) -> Batch:
    members = [member for group in groups for member in group.trajectories]
    return Intake().batch(members, [[1.0] * len(member.transitions) for member in members], loss=loss)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def train(folder: Path) -> Iterator[Callable[[Algorithm], dict[str, float]]]:
    """One step of an algorithm from the same weights; its metrics."""
    opened = []

    def step(algorithm: Algorithm) -> dict[str, float]:
        engine = TorchEngine(device="cpu", dtype="float32", max_nonfinite_steps=0)
        opened.append(engine)
        engine.open(folder, OptimizerConfig(lr=1e-3), seed=0)
        batch = algorithm.batch([GROUP])
        return dict(engine.step(batch.samples, batch.loss_for(algorithm)).metrics)

    yield step
    for engine in opened:
        engine.close()


def test_a_loss_may_compare_with_the_reference_model(train: Callable[[Algorithm], dict[str, float]]) -> None:
    """In its first step policy and reference are the same model, so that the square is that of the constant."""
    decorated = from_loss(needs_reference=True)(anchored)
    assert needs_reference(decorated("rloo").loss)
    assert needs_reference(decorated("gspo").loss)
    saying = Anchored()
    for algorithm in (decorated("rloo"), with_loss(saying), bringing(saying)):
        metrics = train(algorithm)
        assert metrics["loss"] == pytest.approx(0.25, abs=1e-6)
        assert metrics["grad_norm"] > 0.0


def test_a_loss_that_did_not_ask_for_the_reference_is_told_how(train: Callable[[Algorithm], dict[str, float]]) -> None:
    @from_loss
    def forgot(tokens: TokenBatch) -> torch.Tensor:
        return tokens.logprobs - tokens.reference  # type: ignore[operator]

    assert not needs_reference(forgot().loss)
    with pytest.raises(ConfigError, match=r"the loss forgot failed on .*None.*@from_loss\(needs_reference=True\)"):
        train(forgot())

    @from_loss
    def mistyped(tokens: TokenBatch) -> torch.Tensor:
        return tokens.logprob  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="no attribute 'logprob'"):
        train(mistyped())


@pytest.mark.parametrize(
    "make", [lambda loss: from_loss(loss)(), with_loss, bringing], ids=["loss", "batch", "brought"]
)
def test_a_loss_that_prepares_is_prepared(
    make: Callable[[object], Algorithm], train: Callable[[Algorithm], dict[str, float]]
) -> None:
    loss, other = Prepared(), Prepared(6.0)
    once, twice = train(make(loss)), train(make(other))
    (step,) = loss.steps
    assert step.reference is not None
    assert len(step.logprobs) == 6
    assert twice["loss"] == pytest.approx(2 * once["loss"], rel=1e-5)
    with pytest.raises(EngineError, match=r"Prepared\.prepare gave nan for token 0"):
        train(make(Prepared(float("nan"))))


def test_where_the_correction_is_decoupled_a_loss_prepares_from_the_trainers_own_logprobs() -> None:
    loss = Prepared()
    step = StepTokens(*(np.full(2, value) for value in (-1.0, -3.0, 1.0, 1.0, 0)), None, np.zeros(2, np.int64), ())  # type: ignore[arg-type]
    for correction, old in (("mask", -3.0), ("tis", -1.0)):
        made = from_loss(loss)(correction=correction).loss
        assert isinstance(made, StepLoss)
        made.prepare(step)
        assert loss.steps[-1].old_logprobs.tolist() == [old] * 2
    assert from_loss(loss)().name == "Prepared"
    assert not isinstance(from_loss(plain)().loss, StepLoss)


def test_a_whole_loss_is_taken_as_it_is(train: Callable[[Algorithm], dict[str, float]]) -> None:
    penalised = ClippedPolicyGradient(kl_coefficient=0.1)
    assert with_loss(penalised).loss is penalised
    assert bringing(penalised).batch([GROUP]).loss is penalised
    assert "reference_kl" in train(with_loss(penalised))

    def unannotated(tokens):  # type: ignore[no-untyped-def]
        return LossOutput((tokens.weights * plain(tokens)).sum(), {"mine": float(tokens.weights.sum())})

    for algorithm in (with_loss(unannotated), bringing(unannotated)):
        assert train(algorithm)["mine"] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"from_loss got ClippedPolicyGradient, which is a whole loss .*loss=\.\.\."):
        from_loss(penalised)  # type: ignore[arg-type]


def test_a_function_of_each_token_is_weighted_wherever_it_is_given(
    train: Callable[[Algorithm], dict[str, float]],
) -> None:
    expected = train(with_loss(ClippedPolicyGradient(surrogate=plain, correction=NO_CORRECTION)))
    for algorithm in (with_loss(plain), bringing(plain)):
        assert train(algorithm) == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"the loss <lambda> returned a tensor of shape \(\) for 6 tokens"):
        train(bringing(lambda tokens: plain(tokens).sum()))


@pytest.mark.parametrize("loss", ["clip", ClippedPolicyGradient, from_loss(plain), LightningRL()])
def test_what_is_no_loss_is_refused(loss: object) -> None:
    with pytest.raises(ConfigError, match=r"from_batch\(loss=\.\.\.\) got .*, which is no loss: give"):
        with_loss(loss)
    with pytest.raises(ConfigError, match=r"Intake\.batch\(loss=\.\.\.\) got .*, which is no loss: give"):
        bringing(loss).batch([GROUP])
    with pytest.raises(ConfigError, match=r"from_loss got .*, which is no loss: give"):
        from_loss(loss)  # type: ignore[call-overload]


@pytest.mark.parametrize("loss", [plain, SFT().loss, Prepared()])
def test_the_digest_of_a_batch_names_the_loss_that_was_given(loss: Loss) -> None:
    """As in the records of runs that began when a function was kept as it is."""
    batch = rows([GROUP])
    assert (
        batch_digest(rows([GROUP], loss)) == batch_digest(dataclasses.replace(batch, loss=loss)) != batch_digest(batch)
    )


def test_the_digest_of_a_batch_tells_one_correction_from_another() -> None:
    losses = [ClippedPolicyGradient(correction=Correction(kind)) for kind in ("mask", "tis", "tis")]  # type: ignore[arg-type]
    mask, tis, same = (batch_digest(rows([GROUP], loss)) for loss in losses)
    assert mask != tis == same


def test_clips_are_said_once_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """They are no error: a run that was started with them has to be resumable."""
    mine = from_loss(plain)
    assert mine("dapo", clip_high=0.28).clip_high == 0.28, "as a run's record says it"
    assert dataclasses.replace(mine("grpo"), low_level="dapo").clip_high == 0.2
    assert not caplog.messages, "the value of a preset may not be the user's"
    assert mine("dapo", clip_high=0.5) == mine("dapo", clip_high=0.5)
    mine(clip_low=0.125)
    assert caplog.messages == [
        f"{given} has no effect: the loss plain is used as it is, and only the loss itself can clip ratios; leave {name} out"
        for name, given in (("clip_high", "clip_high=0.5"), ("clip_low", "clip_low=0.125"))
    ]


def test_that_a_loss_needs_the_reference_is_not_written_on_what_the_user_gave(
    train: Callable[[Algorithm], dict[str, float]],
) -> None:
    assert needs_reference(from_loss(needs_reference=True)(anchored)().loss)
    assert not needs_reference(anchored)
    assert not needs_reference(from_loss(anchored)().loss)
    frozen = from_loss(needs_reference=True)(Anchored(needs_reference=False))
    assert frozen().name == "Anchored"
    assert train(frozen())["loss"] == pytest.approx(0.25, abs=1e-6)


def test_a_loss_that_prepares_may_be_said_to_need_the_reference(train: Callable[[Algorithm], dict[str, float]]) -> None:
    class Unsaid(Prepared):
        needs_reference = False

    loss = Unsaid()
    train(from_loss(needs_reference=True)(loss)())
    assert loss.steps[0].reference is not None
    with pytest.raises(EngineError, match=r"Unsaid\.prepare gave nan for token 0"):
        train(from_loss(needs_reference=True)(Unsaid(float("nan")))())


@pytest.mark.parametrize(
    ("loss", "kind"), [(Anchored(), "from_loss(Anchored)"), (partial(plain), "from_loss(plain)"), (plain, "plain")]
)
def test_an_algorithm_of_an_object_is_not_called_as_the_objects_class(loss: Any, kind: str) -> None:
    algorithm = from_loss(loss)()
    assert describe_algorithm(algorithm)["type"] == kind
    assert repr(algorithm).startswith(f"{kind}(low_level='grpo'")
    assert algorithm.name == kind.removeprefix("from_loss(").removesuffix(")")
