"""SFT by rejection sampling: which rollouts are imitated."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.batch.trajectory import Group
from lightning.errors import ConfigError
from lightning.losses.protocol import TokenBatch
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group
from lightning.trainer.runs import describe_algorithm
from lightning.types import ToolEvent, token_ids
from lightning_finetuning.sft import SFT, NegativeLogLikelihood

GROUP = make_group([0.5, 1.0, 0.0, 1.0], group="a")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (SFT(), ["a/1"]),
        (SFT(best=2), ["a/1", "a/3"]),
        (SFT(best=3), ["a/0", "a/1", "a/3"]),
        (SFT(best=None, threshold=0.5), ["a/0", "a/1", "a/3"]),
        (SFT(best=1, threshold=0.5), ["a/1"]),
        (SFT(best=None, threshold=0.0), ["a/0", "a/1", "a/2", "a/3"]),
    ],
)
def test_the_best_and_those_above_the_threshold(algorithm: SFT, expected: list[str]) -> None:
    batch = algorithm.batch([GROUP])
    assert [rollout.id for rollout in batch.used] == expected
    for row in batch.samples:
        assert float(row.weights.sum()) == pytest.approx(1 / len(expected))
        assert set(row.advantages[row.weights != 0].tolist()) == {1.0}
    assert algorithm.teaches(GROUP)


def test_groups_that_give_nothing_to_imitate_are_skipped_by_name() -> None:
    equal, low = make_group([1.0, 1.0], group="equal"), make_group([0.2, 0.1], group="low")
    silent = Group("silent", tuple(replace(member, trainable=(False,)) for member in GROUP.trajectories))
    assert SFT().batch([equal, low, silent]).skipped == {"all_rewards_equal": 1, "nothing_to_train": 1}
    batch = SFT(threshold=0.5).batch([equal, low, silent, make_group([], group="empty")])
    assert batch.skipped == {"below_threshold": 1, "nothing_to_train": 1, "too_few_succeeded": 1}
    assert [rollout.id for rollout in batch.used] == ["equal/0"]
    assert not SFT(threshold=0.5).teaches(low)


def test_a_rollout_without_tokens_takes_nobodys_place() -> None:
    best = GROUP.trajectories[1]
    empty = replace(best, transitions=(replace(best.transitions[0], response_ids=token_ids(), logprobs=token_ids()),))
    members = list(GROUP.trajectories)
    members[1] = empty
    assert [rollout.id for rollout in SFT().batch([Group("a", tuple(members))]).used] == ["a/3"]


def test_without_a_threshold_the_worst_of_a_few_survivors_is_not_imitated() -> None:
    """Two of eight rollouts succeeded, and the four best were asked for."""
    assert [rollout.id for rollout in SFT(best=4).batch([make_group([0.0, 1.0], group="a")]).used] == ["a/1"]
    only_the_worst = [replace(member, trainable=(member.reward == 0.0,)) for member in GROUP.trajectories]
    assert SFT().batch([Group("a", tuple(only_the_worst))]).skipped == {"below_threshold": 1}


def test_tools_count() -> None:
    members = list(GROUP.trajectories)
    members[1] = replace(members[1], tool_events=(ToolEvent("search", "error"),))
    assert [one.id for one in SFT(tool_reward={"error": -0.1}).batch([Group("a", tuple(members))]).used] == ["a/3"]


def test_its_loss_is_the_negative_log_likelihood() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights, nan = torch.tensor([0.25, 0.75]), torch.full((2,), float("nan"))
    output = SFT().loss(TokenBatch(current, nan, nan, weights, nan, torch.zeros(2).bool()))
    assert SFT().loss == NegativeLogLikelihood()
    assert output.loss.item() == pytest.approx(1.75)
    assert torch.autograd.grad(output.loss, current)[0].tolist() == [-0.25, -0.75]


def test_a_runs_record_makes_it_again() -> None:
    algorithm = SFT(group_size=4, best=None, threshold=0.5, normalization="token-mean")
    described = json.loads(json.dumps(describe_algorithm(algorithm)))
    assert plugins().algorithm(described["name"])(**described["arguments"]) == algorithm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0, "threshold": 1.0}, "group_size=0"),
        ({"best": 0}, "best=0"),
        ({"best": None}, "would imitate every rollout"),
        ({"best": 8}, "would imitate every rollout"),
        ({"threshold": np.inf}, "threshold=inf"),
        ({"normalization": "constant"}, "'constant' is not one of"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFT(**fields)  # type: ignore[arg-type]
