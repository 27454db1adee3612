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
from lightning import SFT, Trainer
from lightning.algorithms import Batch, Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm
from lightning.batch import given_rows
from lightning.batch.trajectory import Group
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.step import check_loss
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, DataError, EngineError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import (
    TAKEN,
    Loss,
    LossOutput,
    StepLoss,
    StepTokens,
    TokenBatch,
    needs_reference,
    needs_top_logprobs,
)
from lightning.testing.tiny_models import make_tiny_model
from lightning.testing.trajectories import make_group
from lightning.trainer.metrics import staleness, step_metrics
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import batch_digest
from lightning.types import token_ids

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


def test_a_loss_that_wants_top_logprobs_is_given_them(train: Callable[[Algorithm], dict[str, float]]) -> None:
    def forgot(tokens: TokenBatch) -> Any:
        return -tokens.top_logprobs.sum(-1)  # type: ignore[union-attr]

    def doubts(tokens: TokenBatch) -> Any:
        assert tokens.top_logprobs is not None
        return -tokens.logprobs, {"margin": tokens.top_logprobs[:, 0] - tokens.top_logprobs[:, 1]}

    asking = partial(doubts)
    asking.needs_top_logprobs = 2  # type: ignore[attr-defined]
    for algorithm in (from_loss(needs_top_logprobs=2)(doubts)(), with_loss(asking), bringing(asking)):
        assert train(algorithm)["margin"] > 0
    assert needs_top_logprobs(from_loss(needs_reference=True, needs_top_logprobs=2)(doubts)("gspo").loss) == 2
    assert needs_top_logprobs(from_loss(doubts)().loss) == 0
    with pytest.raises(
        ConfigError, match=r"the loss forgot failed on .*tokens\.top_logprobs only for a loss with needs_"
    ):
        train(from_loss(forgot)())


@pytest.mark.parametrize("wanted", [0, -1, 2.0, True, "4", np.int64(4)], ids=repr)
def test_a_number_of_top_logprobs_that_cannot_be_is_refused_when_the_loss_is_given(wanted: Any) -> None:
    said = "the loss plain has needs_top_logprobs = .*: set it to the number of most probable tokens"
    with pytest.raises(ConfigError, match=said):
        from_loss(needs_top_logprobs=wanted)(plain)
    made = partial(plain)
    made.needs_top_logprobs = wanted  # type: ignore[attr-defined]
    for give in (from_loss, with_loss, lambda loss: bringing(loss).batch([GROUP])):
        with pytest.raises(ConfigError, match=said):
            give(made)


def test_more_top_logprobs_than_the_model_has_tokens_are_refused_before_anything_starts(
    folder: Path, tmp_path: Path
) -> None:
    engine, algorithm = TorchEngine(device="cpu"), from_loss(needs_top_logprobs=400)(plain)()
    said = "the loss plain has needs_top_logprobs = 400, and the model's vocabulary has 320 tokens: set it to 320 at the most"
    with pytest.raises(ConfigError, match=said):
        check_loss(engine, folder, algorithm.loss)
    trainer = Trainer(folder, algorithm, out=tmp_path / "run", steps=1, engine="torch", lr=1e-3)
    with pytest.raises(ConfigError, match=said):
        trainer.fit(lambda task, llm: 1.0, train=["a task"])
    assert not [*tmp_path.rglob("*vllm*")]
    with pytest.raises(
        ConfigError,
        match=r"the loss plain has .* the engine Other gives no logprobs of most",
    ):
        check_loss(type("Other", (), {})(), folder, algorithm.loss)
    check_loss(engine, folder, from_loss(needs_top_logprobs=320)(plain)().loss)
    engine.open(folder, OptimizerConfig(), seed=0)
    for take in (engine.step, engine.forward_backward):
        with pytest.raises(ConfigError, match=said):
            take(algorithm.batch([GROUP]).samples, algorithm.loss)
    engine.close()


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


def test_the_digest_of_a_batch_tells_one_function_from_another() -> None:
    """By name and by source: an edited function has its old name."""

    def imitate(tokens: Any) -> Any:
        return -0.1 * tokens.logprobs

    def forget(tokens: Any) -> Any:
        return 10 * tokens.logprobs

    kept, again = batch_digest(rows([GROUP], imitate)), batch_digest(rows([GROUP], imitate))
    imitated = imitate

    def imitate(tokens: Any) -> Any:  # type: ignore[no-redef]
        return -0.2 * tokens.logprobs

    others = [forget, imitate, ClippedPolicyGradient(surrogate=imitate), ClippedPolicyGradient(surrogate=imitated)]
    assert len({kept, again, *(batch_digest(rows([GROUP], loss)) for loss in others)}) == 5


def test_the_digest_of_a_batch_has_what_a_function_asks_for_and_not_what_may_change_while_it_runs() -> None:
    def made(top: int | None = None) -> Any:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1

        def pull(tokens: Any) -> Any:
            count()
            return -tokens * calls

        pull.needs_top_logprobs = top  # type: ignore[attr-defined]
        return pull

    first = made()
    digest = batch_digest(rows([GROUP], first))
    assert batch_digest(rows([GROUP], made(2))) not in {digest, batch_digest(rows([GROUP], made(3)))}
    first(1.0)
    assert batch_digest(rows([GROUP], first)) == digest == batch_digest(rows([GROUP], made()))


def test_what_a_loss_asks_for_is_in_the_record_of_a_run() -> None:
    """Another number is a change of the algorithm, as another function is."""
    described = [describe_algorithm(from_loss(**needs)(plain)()) for needs in ({}, {"needs_top_logprobs": 4})]
    assert described[0] != described[1]
    assert described[1]["functions"]["needs_top_logprobs"] == 4  # type: ignore[index,call-overload]
    mine = partial(plain)
    mine.needs_top_logprobs = 4  # type: ignore[attr-defined]
    assert describe_algorithm(from_loss(mine)())["functions"]["needs_top_logprobs"] == 4, "however it is said"  # type: ignore[index,call-overload]


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
    assert mine("gspo", correction="tis").ratio == "token", "the correction chose it"
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


class TopEntropy:
    """Trains the tokens of a step whose entropy is highest (arXiv 2506.01939), and reports their share."""

    def __init__(self, share: float = 0.2) -> None:
        self.share = share
        self.steps: list[StepTokens] = []

    def prepare(self, step: StepTokens) -> np.ndarray:
        self.steps.append(step)
        assert step.entropy is not None
        return step.entropy >= np.quantile(step.entropy, 1 - self.share)

    def __call__(self, tokens: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert tokens.prepared is not None
        loss = -tokens.advantages * tokens.logprobs * tokens.prepared
        return loss, {"kept": tokens.prepared, "sure": tokens.entropy < 4.0, "surprise_max": -tokens.logprobs}


@pytest.mark.parametrize("budget", [1, 8192])
@pytest.mark.parametrize("step", ["linear", "tree"])
def test_a_loss_sees_entropies_and_reports_metrics_of_its_own(folder: Path, budget: int, step: Any) -> None:
    engine = TorchEngine(device="cpu", dtype="float32", tokens_per_microbatch=budget, step=step)
    engine.open(folder, OptimizerConfig(lr=1e-3), seed=0)
    members = make_group([0.0, 1.0, 0.5], calls=(((1, 2, 3), (4, 5, 6, 7)), ((8, 9), (10, 11, 12))))
    loss = TopEntropy(share=0.4)
    algorithm = from_loss(loss)("rloo", normalization="sequence-mean")
    batch = algorithm.batch([members])
    model, expected = engine._opened().model, []
    for row in batch.samples:
        logits = model(torch.tensor(row.ids[None].astype(np.int64))).logits[0, :-1].log_softmax(-1)
        entropy = -(logits.exp() * logits).sum(-1).detach().numpy()
        expected += [entropy[place - 1] for place in np.flatnonzero(row.weights)]
    metrics = engine.step(batch.samples, batch.loss_for(algorithm)).metrics
    (seen,) = loss.steps
    assert seen.entropy is not None
    np.testing.assert_allclose(seen.entropy, expected, atol=1e-5)
    kept = seen.entropy >= np.quantile(seen.entropy, 0.6)
    assert metrics["kept"] == pytest.approx(float((seen.weights * kept).sum()), abs=1e-6)
    assert metrics["sure"] == pytest.approx(float((seen.weights * (seen.entropy < 4.0)).sum()), abs=1e-6)
    assert metrics["surprise_max"] == pytest.approx(float(-seen.logprobs.min()), abs=1e-5)
    engine.close()


def test_several_losses_of_one_step_add_up(folder: Path) -> None:
    """Imitation of answers that nobody sampled beside a policy gradient: one gradient, and each loss has metrics of its own."""

    def imitate(tokens: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -0.1 * tokens.logprobs, {"nats": -tokens.logprobs}

    engine = TorchEngine(device="cpu", dtype="float32")
    engine.open(folder, OptimizerConfig(lr=1e-3), seed=0)
    batch, answers = rows([GROUP]), [([1, 2], [30, 31, 32]), ([5], [6])]
    shown = given_rows([(token_ids(prompt), token_ids(response)) for prompt, response in answers])
    algorithm = LightningRL()
    model = engine._opened().model

    def gradient() -> dict[str, torch.Tensor]:
        found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        engine.discard_gradient()
        return found

    engine.forward_backward(batch.samples, batch.loss_for(algorithm))
    alone = gradient()
    engine.forward_backward(batch.samples, batch.loss_for(algorithm))
    metrics = engine.forward_backward(shown, batch.loss_for(algorithm, imitate)).metrics
    both = gradient()
    logprobs = torch.cat(
        [
            model(torch.tensor([prompt + response]))
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)[range(len(response)), response]
            for prompt, response in answers
        ]
    )
    (-0.1 * logprobs.mean()).backward()  # type: ignore[no-untyped-call]
    expected = gradient()
    for name, found in both.items():
        torch.testing.assert_close(found, alone[name] + expected[name], rtol=1e-4, atol=1e-6)
    assert metrics["nats"] == pytest.approx(float(-logprobs.detach().mean()), rel=1e-5)
    assert metrics["old_logprob_share"] == pytest.approx(0.5), "of both together"
    with pytest.raises(ConfigError, match=r"forward_backward\(loss=\.\.\.\) got 'clip', which is no loss"):
        batch.loss_for(algorithm, "clip")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="answer 1 of 2 has no response"):
        given_rows([(token_ids([1]), token_ids([2])), (token_ids([1]), token_ids([]))])
    engine.close()


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": True}, "cannot report the metric 'loss': the name is one of lightning's own"),
        ({"reward": True}, "cannot report the metric 'reward'"),
        ({"mine/share": True}, "the metric 'mine/share': the name has a slash"),
        ({"entropy": True}, "the loss mine reports the metric 'entropy', which is reported of every loss"),
        ({"ratio_max": True}, "the metric 'ratio_max', which is reported of every loss"),
        (
            {"share": "sum"},
            r"the loss mine gave a tensor of shape \(\) for its metric 'share': .* each of the 6 tokens",
        ),
        ({"share": 0.5}, "the loss mine gave 0.5 for its metric 'share'"),
        ({"share": "nan"}, "the loss mine gave a value that is not finite for its metric 'share'"),
        (["share"], r"the loss mine returned \(tensor.*it returns \(loss, {'name': values}\)"),
    ],
)
def test_metrics_that_cannot_be_recorded_are_refused_by_name(
    metrics: Any, said: str, train: Callable[[Algorithm], dict[str, float]]
) -> None:
    def mine(tokens: TokenBatch) -> Any:
        made = {True: tokens.logprobs, "sum": tokens.logprobs.sum(), "nan": tokens.logprobs * float("nan")}
        given = (
            {name: made.get(value, value) for name, value in metrics.items()} if isinstance(metrics, dict) else metrics
        )
        return plain(tokens), given

    for algorithm in (from_loss(mine)(), with_loss(mine)):
        with pytest.raises(ConfigError, match=f"(?s){said}"):
            train(algorithm)


def test_no_metric_of_a_step_is_free_for_a_loss(train: Callable[[Algorithm], dict[str, float]]) -> None:
    metrics, batch = train(with_loss(plain)), rows([GROUP])
    step = step_metrics([member.rollout for member in GROUP.trajectories], [GROUP], batch, StepResult({}, {}))
    of_losses = (
        LightningRL()
        .loss(
            TokenBatch(*(torch.ones(2) for _ in range(5)), has_old=torch.ones(2).bool())  # type: ignore[misc]
        )
        .metrics
    )
    names = {name for name in metrics.keys() | step.keys() if "/" not in name}
    assert names - of_losses.keys() <= TAKEN
    assert {*staleness(1, batch)} <= TAKEN
