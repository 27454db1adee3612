"""The critic: what it says at first, what it learns, what it leaves alone, and how it is kept."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch import Sample
from lightning.config import LoraConfig
from lightning.config.plugin_settings import Config, EngineConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import DataError, EngineError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.testing.trajectories import make_group
from lightning.trainer.training_data import fresh_values
from lightning_credits.value_head import CriticHead
from lightning_proof.recorded_step import recorded_values
from safetensors.torch import load_file

Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]
LOSS = ClippedPolicyGradient(correction=NO_CORRECTION)


def with_targets(row: Sample, targets: Sequence[float], weight: float) -> Sample:
    spans = zip(row.spans, targets, strict=True)
    return replace(row, spans=tuple(replace(span, value_target=goal, value_weight=weight) for span, goal in spans))


def some_rows(make_row: Make, count: int = 4) -> list[Sample]:
    """Rows of two calls with states of different worth."""
    made = []
    for seed in range(count):
        row = make_row(12 + seed, [(4, 6, 1.0, 0.1), (9, 12, -1.0, 0.1)], seed=seed, name=f"r{seed}")
        made.append(with_targets(row, (seed % 2, 2.0 - seed), 1 / (2 * count)))
    return made


def test_a_new_critic_values_every_state_at_0(open_engine: Open, make_row: Make) -> None:
    rows = some_rows(make_row)
    values = open_engine(critic=True).values([*rows, replace(rows[0], spans=())])
    assert [own.tolist() for own in values] == [[0.0, 0.0]] * 4 + [[]]
    assert {own.dtype for own in values} == {np.dtype(np.float32)}
    assert open_engine(critic=True).values([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "kind"), [("frozen", "linear"), ("shared", "tree")])
def test_it_learns_what_states_are_worth(open_engine: Open, make_row: Make, trunk: str, kind: str) -> None:
    engine = open_engine(critic=True, critic_trunk=trunk, critic_lr=0.2, step=kind)
    rows = some_rows(make_row)
    metrics = [engine.step(rows, LOSS).metrics for _ in range(40)]
    goals = np.array([span.value_target for row in rows for span in row.spans])
    assert metrics[0]["value_loss"] == pytest.approx(np.square(goals).mean() / 2)
    assert metrics[0]["value_mean"] == metrics[0]["value_explained_variance"] == 0.0
    assert metrics[0]["value_target"] == pytest.approx(goals.mean())
    assert metrics[-1]["value_loss"] < 0.1 * metrics[0]["value_loss"]
    assert metrics[-1]["value_explained_variance"] > 0.8
    np.testing.assert_allclose(np.concatenate(engine.values(rows)), goals, atol=0.5)


def test_values_are_those_of_the_prompts_alone(open_engine: Open, make_row: Make) -> None:
    engine = open_engine(critic=True, critic_lr=0.1)
    rows = some_rows(make_row)
    for _ in range(3):
        engine.step(rows, LOSS)
    row = rows[1]
    first, second = engine.values([row])[0]
    assert first != second
    (span, _) = row.spans
    changed = row.ids.copy()
    changed[span.start :] = (changed[span.start :] + 1) % 320
    assert engine.values([replace(row, ids=changed)])[0][0] == pytest.approx(first, abs=1e-6)
    changed[span.start - 1] = (changed[span.start - 1] + 1) % 320
    assert engine.values([replace(row, ids=changed)])[0][0] != pytest.approx(first, abs=1e-4)


def test_values_over_a_tree_are_the_same(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    rows = [*some_rows(make_row), replace(some_rows(make_row)[2], spans=())]
    one, other = open_engine(critic=True, critic_lr=0.1), open_engine(critic=True, step="tree", tokens_per_microbatch=9)
    one.step(rows, LOSS)
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    other._budget = 9
    for mine, theirs in zip(one.values(rows), other.values(rows), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "per-call", "tree"])
def test_on_a_frozen_trunk_the_policy_does_not_notice_it(open_engine: Open, make_row: Make, kind: str) -> None:
    rows = some_rows(make_row)
    plain, valued = open_engine(step=kind), open_engine(step=kind, critic=True, critic_lr=0.5)
    for _ in range(3):
        one = plain.step([replace(row, spans=_without(row)) for row in rows], LOSS).metrics
        other = valued.step(rows, LOSS).metrics
    assert all(torch.equal(value, valued._parameters[name]) for name, value in plain._parameters.items())
    assert {name: other[name] for name in one} == one
    assert other["critic_grad_norm"] > 0


def _without(row: Sample) -> tuple:  # type: ignore[type-arg]
    return tuple(replace(span, value_target=float("nan"), value_weight=0.0) for span in row.spans)


@pytest.mark.parametrize("trunk", ["frozen", "shared"])
def test_whether_the_trunk_learns_values_is_a_setting(open_engine: Open, make_row: Make, trunk: str) -> None:
    engine = open_engine(critic=True, critic_trunk=trunk, lr=1e-2)
    rows = [replace(row, weights=np.zeros_like(row.weights)) for row in some_rows(make_row)]  # no policy gradient
    for _ in range(2):  # the first step's head is 0, and passes nothing on
        norms = engine.step(rows, LOSS).metrics
    assert norms["stepped"] == 1.0
    assert norms["tokens"] == 0.0
    assert norms["critic_grad_norm"] > 0
    assert (norms["grad_norm"] > 0) == (trunk == "shared")


def test_the_critic_has_its_own_learning_rate_in_proportion(open_engine: Open, make_row: Make) -> None:
    engine = open_engine(critic=True, lr=1e-5, critic_lr=0.25)
    rows = some_rows(make_row)
    bias = engine._learning()["critic.bias"]
    moves = []
    for rate in (5e-6, 1e-5):
        before = float(bias.detach())
        engine.step(rows, LOSS, rate)
        moves.append(abs(float(bias.detach()) - before))
    assert moves[0] == pytest.approx(0.125, rel=1e-3)  # Adam's first step is the rate itself
    assert moves[1] > 0.15


def test_its_metrics_do_not_depend_on_microbatches(open_engine: Open, make_row: Make) -> None:
    rows = some_rows(make_row)
    one = open_engine(critic=True).step(rows, LOSS).metrics
    other = open_engine(critic=True, tokens_per_microbatch=1).step(rows, LOSS).metrics
    assert other["microbatches"] == 4 > one["microbatches"]
    for name in ("value_loss", "value_mean", "value_target", "value_explained_variance", "critic_grad_norm"):
        assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7)


def test_rows_without_targets_are_trained_as_ever(open_engine: Open, make_row: Make) -> None:
    metrics = open_engine(critic=True).step([make_row(8, [(4, 8, 1.0, 0.1)])], LOSS).metrics
    assert metrics["stepped"] == 1.0
    assert metrics["critic_grad_norm"] == 0.0
    assert "value_loss" not in metrics


def test_values_without_a_critic_say_how_to_get_one(open_engine: Open, make_row: Make) -> None:
    with pytest.raises(EngineError, match="has no head: open it with head="):
        open_engine().values(some_rows(make_row))
    with pytest.raises(EngineError, match="no head to learn them: open it with head="):
        open_engine().step(some_rows(make_row), LOSS)


@pytest.mark.parametrize(("target", "weight"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_a_target_that_is_not_finite_is_refused(
    open_engine: Open, make_row: Make, target: float, weight: float
) -> None:
    row = with_targets(make_row(8, [(4, 8, 1.0, 0.1)], name="culprit"), [target], weight)
    with pytest.raises(DataError, match=r"rollout culprit .* the value that a state should have, or its weight"):
        open_engine(critic=True).step([row], LOSS)


def test_a_value_loss_that_is_not_finite_takes_no_step(open_engine: Open, make_row: Make) -> None:
    engine = open_engine(critic=True, max_nonfinite_steps=0)
    before = {name: value.detach().clone() for name, value in engine._learning().items()}
    row = with_targets(make_row(8, [(4, 8, 1.0, 0.1)], name="culprit"), [1e30], 1.0)
    with pytest.raises(EngineError, match=r"value loss is inf at step 1 in 1 row .* this update was not taken"):
        engine.step([row], LOSS)
    assert all(torch.equal(value, before[name]) for name, value in engine._learning().items())


def test_memory_that_runs_out_while_valuing_halves_the_microbatch(
    open_engine: Open, make_row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(critic=True, tokens_per_microbatch=128)
    trunk = engine._opened().model.model
    forward = trunk.forward

    def limited(*arguments: object, **named: torch.Tensor) -> object:
        if named["input_ids"].numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*arguments, **named)

    monkeypatch.setattr(trunk, "forward", limited)
    assert len(engine.values(some_rows(make_row, 8))) == 8
    assert engine._budget == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{}, {"lora": LoraConfig(rank=4)}, {"dtype": "bfloat16", "critic_trunk": "shared"}]
)
def test_a_resumed_critic_goes_on_bit_for_bit(
    open_engine: Open, make_row: Make, tmp_path: Path, arguments: dict[str, object]
) -> None:
    rows = some_rows(make_row)
    first = open_engine(critic=True, **arguments)
    first.step(rows, LOSS)
    first.save(tmp_path / "state")
    went_on = [dict(first.step(rows, LOSS).metrics) for _ in range(2)]
    second = open_engine(critic=True, seed=9, **arguments)
    second.load(tmp_path / "state")
    assert [dict(second.step(rows, LOSS).metrics) for _ in range(2)] == went_on
    assert {value.dtype for name, value in second._learning().items() if "critic" in name} == {torch.float32}
    for name, value in first._learning().items():
        assert torch.equal(value, second._learning()[name])


def test_another_critic_setting_is_refused(open_engine: Open, tmp_path: Path) -> None:
    kinds: dict[str, dict[str, object]] = {
        "without a head": {},
        "with a critic on a frozen trunk": {"critic": True},
        "with a critic on a shared trunk": {"critic": True, "critic_trunk": "shared"},
    }
    engines = {name: open_engine(**arguments) for name, arguments in kinds.items()}
    for name, engine in engines.items():
        engine.save(tmp_path / name)
        for other, theirs in engines.items():
            if other != name:
                with pytest.raises(EngineError, match=f"saved {name}, but this engine was opened {other}: resume with"):
                    theirs.load(tmp_path / name)
        engine.load(tmp_path / name)


def test_the_exported_policy_knows_nothing_of_it(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine, plain = open_engine(critic=True), open_engine()
    engine.step(some_rows(make_row), LOSS)
    names = set(load_file(plain.weights(tmp_path / "plain.safetensors")))
    assert set(load_file(engine.weights(tmp_path / "weights.safetensors"))) == names
    assert set(load_file(engine.export(tmp_path / "model") / "model.safetensors")) == names


def test_states_that_calls_share_have_a_loss_for_each(open_engine: Open, make_row: Make) -> None:
    """Siblings begin with one prompt: its value is computed once and learns the mean of what became of it."""
    one = make_row(10, [(6, 10, 1.0, 0.1)], seed=1, name="one")
    other = make_row(10, [(6, 10, -1.0, 0.1)], seed=2, name="other")
    other.ids[:6] = one.ids[:6]
    rows = [with_targets(one, [1.0], 0.5), with_targets(other, [0.0], 0.5)]
    engine = open_engine(critic=True, critic_lr=0.1, step="tree")
    metrics = engine.step(rows, LOSS).metrics
    assert metrics["tokens_forward"] == 6 + 4 + 4
    assert metrics["value_target"] == 0.5
    for _ in range(30):
        engine.step([replace(row, weights=np.zeros_like(row.weights)) for row in rows], LOSS)
    assert np.concatenate(engine.values(rows)).tolist() == pytest.approx([0.5, 0.5], abs=0.05)


@pytest.mark.parametrize("trunk", ["frozen", "shared"])
async def test_a_replay_from_recorded_values_is_bit_for_bit(open_engine: Open, trunk: str) -> None:
    """PPO as the loop trains it, and again as a resume does, which asks no critic."""
    ppo, store = LightningRL("ppo", group_size=2, correction="none"), MemoryStore()
    await store.open()
    calls = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])]
    steps = [[make_group([float(step), 1.0], group=f"g{step}", calls=calls)] for step in range(3)]
    first, second = (open_engine(critic=True, critic_trunk=trunk, step="tree") for _ in range(2))
    for number, groups in enumerate(steps):
        valued = await fresh_values(store, "run", number, groups, first.values)
        first.step(ppo.batch(valued).samples, ppo.loss)
        assert any(member.values != (0.0, 0.0) for member in valued[0].trajectories) == (number > 0)
    for number, groups in enumerate(steps):
        second.step(ppo.batch(await recorded_values(store, "run", number, groups)).samples, ppo.loss)
    for name, value in first._learning().items():
        assert torch.equal(value, second._learning()[name])
    await store.close()


def test_the_settings_of_the_engine_are_those_of_the_head() -> None:
    section = EngineConfig(critic_trunk="shared", critic_lr=0.25)
    head = plugins().get("heads", "critic")(Config(engine=section))
    assert head == CriticHead("shared", 0.25)
    assert str(head) == "critic on a shared trunk"
    assert (head.trains_model, CriticHead().trains_model) == (True, False)
    assert pickle.loads(pickle.dumps(head)) == head
