"""DPO: which rollouts of a group are paired, and what is left out by which name."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace

import pytest
from lightning.batch.trajectory import Group
from lightning.errors import ConfigError, DataError
from lightning.losses.protocol import LossOutput, TokenBatch
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import batch_digest
from lightning.types import StepReward, ToolEvent, logprobs
from lightning_finetuning.dpo import DPO, PreferenceLoss


def pairs_of(batch) -> list[str]:
    return [f"{won}>{lost}" for won, lost in batch.loss.pairs]


def test_the_best_is_paired_with_the_worst() -> None:
    batch = DPO().batch([make_group([0.5, 1.0, 0.0, 1.0], group="a"), make_group([0.2, 0.1], group="b")])
    assert pairs_of(batch) == ["a/1>a/2", "b/0>b/1"]
    assert [rollout.id for rollout in batch.used] == ["a/1", "a/2", "b/0", "b/1"]
    assert [float(row.advantages[-1]) for row in batch.samples] == [1.0, -1.0, 1.0, -1.0]
    assert sum(float(row.weights.sum()) for row in batch.samples) == pytest.approx(1.0)


def test_the_digest_of_a_step_covers_its_pairs_and_how_they_are_compared() -> None:
    batch = DPO().batch([make_group([1.0, 0.0], group="a"), make_group([1.0, 0.0], group="b")])
    same = replace(batch, loss=PreferenceLoss((("a/0", "a/1"), ("b/0", "b/1"))))
    crossed = replace(batch, loss=PreferenceLoss((("a/0", "b/1"), ("b/0", "a/1"))))
    colder = replace(batch, loss=PreferenceLoss(same.loss.pairs, beta=0.2))
    assert batch_digest(batch) == batch_digest(same)
    assert len({batch_digest(other) for other in (batch, crossed, colder, replace(batch, loss=None))}) == 4


def test_a_loss_of_ones_own_has_the_same_digest_in_every_process() -> None:
    @dataclass(frozen=True)
    class Own:
        function: object
        factor: float
        measured: float = field(default=0.0, init=False)

        def __call__(self, tokens: TokenBatch) -> LossOutput:
            return LossOutput(tokens.logprobs.sum())

    batch = DPO().batch([make_group([1.0, 0.0])])
    one, same, other = (
        batch_digest(replace(batch, loss=Own(lambda tokens: tokens, factor))) for factor in (0.5, 0.5, 1.0)
    )
    assert one == same != other


def test_all_pairs_whose_returns_differ_by_more_than_the_margin() -> None:
    group = make_group([0.5, 1.0, 0.0, 1.0], group="a")
    batch = DPO(pairs="all").batch([group])
    assert sorted(pairs_of(batch)) == ["a/0>a/2", "a/1>a/0", "a/1>a/2", "a/3>a/0", "a/3>a/2"]
    assert [float(row.advantages[-1]) for row in batch.samples] == [-1.0, 2.0, -3.0, 2.0]
    assert sorted(pairs_of(DPO(pairs="all", margin=0.5).batch([group]))) == ["a/1>a/2", "a/3>a/2"]


def test_groups_without_a_pair_are_skipped_by_name() -> None:
    silent = make_group([1.0, 0.5, 0.0], group="silent")
    members = [replace(member, trainable=(index == 1,)) for index, member in enumerate(silent.trajectories)]
    groups = [
        make_group([1.0, 1.0], group="equal"),
        make_group([1.0], group="single"),
        make_group([1.0, 0.8], group="close"),
        Group("silent", tuple(members)),
        Group("dumb", tuple(replace(member, trainable=(False,)) for member in silent.trajectories)),
        make_group([1.0, 0.0], group="good"),
    ]
    algorithm = DPO(margin=0.5)
    batch = algorithm.batch(groups)
    assert batch.skipped == {
        "all_rewards_equal": 1,
        "too_few_succeeded": 1,
        "margin_too_small": 1,
        "too_few_trainable": 1,
        "nothing_to_train": 1,
    }
    assert pairs_of(batch) == ["good/0>good/1"]
    assert [algorithm.teaches(group) for group in groups] == [False] * 5 + [True]


def test_a_flawed_rollout_is_no_part_of_a_pair(caplog: pytest.LogCaptureFixture) -> None:
    group = make_group([0.0, 0.5, 1.0], group="a")
    bad = group.trajectories[2]
    bad = replace(bad, transitions=(replace(bad.transitions[0], logprobs=logprobs([float("nan")])),))
    with caplog.at_level(logging.WARNING):
        batch = DPO().batch([Group("a", (*group.trajectories[:2], bad))])
    assert pairs_of(batch) == ["a/1>a/0"]
    assert batch.dropped == {"logprob_not_finite": 1}
    assert "rollout a/2 attempt 1 call 0 cannot be trained on" in caplog.text


def test_step_rewards_and_tools_are_part_of_the_ranking() -> None:
    first, second = make_group([1.0, 1.0], group="a").trajectories
    helped = Group("a", (first, replace(second, step_rewards=(StepReward(0.5),))))
    assert pairs_of(DPO().batch([helped])) == ["a/1>a/0"]
    failed = Group("a", (first, replace(second, tool_events=(ToolEvent("search", "error"),))))
    assert pairs_of(DPO(tool_reward={"error": -0.1}).batch([failed])) == ["a/0>a/1"]


def test_a_reward_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="rollout group-0/1 attempt 1 has the reward nan"):
        DPO().batch([make_group([1.0, float("nan")])])


def test_returns_that_overflow_skip_their_group() -> None:
    first, second = make_group([1.7e308, 0.0]).trajectories
    group = Group("a", (replace(first, step_rewards=(StepReward(1.7e308),)), second))
    assert DPO().batch([group]).skipped == {"return_not_finite": 1}


def test_nothing_at_all_is_an_empty_batch() -> None:
    batch = DPO().batch([])
    assert (batch.samples, batch.used, batch.skipped) == ((), (), {})


def test_the_batch_brings_its_pairs_and_the_settings() -> None:
    algorithm = DPO(beta=0.3, label_smoothing=0.1, length_normalized=True)
    loss = algorithm.batch([make_group([1.0, 0.0], group="a")]).loss
    assert loss == PreferenceLoss((("a/0", "a/1"),), 0.3, 0.1, True)
    assert algorithm.loss == PreferenceLoss((), 0.3, 0.1, True)


def test_a_runs_record_makes_it_again() -> None:
    algorithm = DPO(group_size=4, pairs="all", margin=0.1, tool_reward={"error": -0.1})
    described = json.loads(json.dumps(describe_algorithm(algorithm)))
    assert plugins().algorithm(described["name"])(**described["arguments"]) == algorithm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 1}, "group_size=1"),
        ({"pairs": "some"}, "unknown pairs 'some': use one of best-worst, all"),
        ({"margin": -1.0}, "margin=-1"),
        ({"beta": 0.0}, "beta=0"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5"),
        ({"tool_reward": {"failed": 1.0}}, "no status 'failed'"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DPO(**fields)  # type: ignore[arg-type]
