"""LightningRL: which groups and rollouts make rows, with which advantages, in which order."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch.trajectory import Group
from lightning.credit import GroupAdvantage
from lightning.errors import ConfigError, DataError, PluginError
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.trainer.runs import describe_algorithm
from lightning.types import StepReward, VersionRun, logprobs, token_ids

TWO_CALLS = [((1, 2), (3,)), ((1, 2, 3, 4), (5, 6))]


def test_a_mixed_group_makes_one_row_per_rollout_with_its_advantage() -> None:
    batch = LightningRL(group_size=2).batch([make_group([1.0, 0.0], calls=TWO_CALLS)])
    assert [row.ids.tolist() for row in batch.samples] == [[1, 2, 3, 4, 5, 6]] * 2
    expected = 0.5 / (np.sqrt(0.5) + 1e-4)
    for row, sign in zip(batch.samples, (1, -1), strict=True):
        np.testing.assert_allclose(row.advantages[row.weights != 0], sign * expected, rtol=1e-6)
        np.testing.assert_allclose(row.weights[row.weights != 0], 1 / 6)
    assert [rollout.id for rollout in batch.used] == ["group-0/0", "group-0/1"]
    assert batch.skipped == {}


def test_groups_that_teach_nothing_are_skipped_and_counted() -> None:
    silent = make_group([1.0, 0.0], group="silent")
    silent = Group("silent", tuple(replace(member, trainable=(False,)) for member in silent.trajectories))
    batch = LightningRL().batch(
        [
            make_group([1.0, 1.0], group="solved"),
            make_group([0.1 + 0.2, 0.3], group="rounding"),
            make_group([1.0], group="single"),
            make_group([], group="empty"),
            silent,
            make_group([1.0, 0.999], group="close"),
        ]
    )
    assert batch.skipped == {"all_rewards_equal": 2, "too_few_succeeded": 2, "nothing_to_train": 1}
    assert {rollout.group for rollout in batch.used} == {"close"}


def test_where_rollouts_are_not_compared_one_teaches_and_equals_teach_beside_others() -> None:
    groups = [make_group([1.0, 1.0], group="solved"), make_group([0.0], group="single"), make_group([], group="empty")]
    batch = LightningRL("reinforce++", group_size=1, advantage_eps=0.0).batch(groups)
    assert [rollout.id for rollout in batch.used] == ["solved/0", "solved/1", "single/0"]
    found = [float(row.advantages[-1]) for row in batch.samples]
    assert found == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])
    assert batch.skipped == {"too_few_succeeded": 1}


def test_a_step_in_which_all_returns_are_equal_is_skipped_whole() -> None:
    groups = [make_group([1.0, 1.0], group="a"), make_group([1.0], group="b")]
    batch = LightningRL("reinforce++").batch(groups)
    assert (batch.samples, batch.skipped) == ((), {"all_rewards_equal": 2})


def test_teaching_is_what_batch_does_not_skip() -> None:
    flawed = with_flaw(make_group([1.0, 0.0], group="flawed"), 0, prompt_ids=token_ids())
    groups = [
        flawed,
        make_group([1.0, 1.0], group="b"),
        make_group([1.0, 0.0], group="c"),
        make_group([1.0], group="d"),
    ]
    algorithm = LightningRL("dapo")
    taught = [algorithm.teaches(group) for group in groups]
    assert taught == [False, False, True, False]
    assert {rollout.group for rollout in algorithm.batch(groups).used} == {"c"}


def test_nothing_at_all_is_an_empty_batch() -> None:
    batch = LightningRL().batch([])
    assert (batch.samples, batch.used, batch.skipped) == ((), (), {})


def test_a_rollout_with_no_advantage_has_no_row_unless_entropy_is_trained() -> None:
    group = make_group([1.0, 0.5, 0.0])
    assert [rollout.index for rollout in LightningRL().batch([group]).used] == [0, 2]
    assert [rollout.index for rollout in LightningRL(entropy_coefficient=0.01).batch([group]).used] == [0, 1, 2]


def test_step_rewards_are_part_of_the_return() -> None:
    tied = make_group([1.0, 1.0])
    helped = replace(tied.trajectories[0], step_rewards=(StepReward(0.5),))
    batch = LightningRL("dr_grpo").batch([Group("g", (helped, tied.trajectories[1]))])
    assert [float(row.advantages[-1]) for row in batch.samples] == [0.25, -0.25]


def test_order_follows_the_groups_and_is_repeatable() -> None:
    groups = [make_group([1.0, 0.0], group="b"), make_group([0.0, 1.0], group="a")]
    first, again = LightningRL().batch(groups), LightningRL().batch(groups)
    assert [rollout.id for rollout in first.used] == ["b/0", "b/1", "a/0", "a/1"]
    for one, other in zip(first.samples, again.samples, strict=True):
        assert one.spans == other.spans
        for name in ("ids", "weights", "advantages", "logprobs", "versions"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


@pytest.mark.parametrize(
    ("algorithm", "advantage", "weight"),
    [
        (LightningRL("rloo"), 0.75, 1 / 3),
        (LightningRL("dr_grpo", constant_tokens=10), 0.5, 1 / 30),
        (LightningRL("dr_grpo", normalization="token-mean"), 0.5, 1 / 3),
    ],
)
def test_other_low_levels(algorithm: LightningRL, advantage: float, weight: float) -> None:
    row = algorithm.batch([make_group([1.0, 0.5, 0.0])]).samples[0]
    assert row.advantages[-1] == pytest.approx(advantage)
    assert row.weights[-1] == pytest.approx(weight)


def test_credit_by_name_and_by_function() -> None:
    group = make_group([1.0, 0.0], calls=TWO_CALLS)
    named = LightningRL("dr_grpo", credit="discounted").batch([group]).samples[0]
    assert named.advantages[[2, 4]].tolist() == pytest.approx([0.45, 0.5])

    def last_only(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        values = advantage(np.array([member.reward for member in group.trajectories]))
        return [np.array([0.0, value]) for value in values]

    own = LightningRL("dr_grpo", credit=last_only).batch([group]).samples[0]
    assert [span.seq for span in own.spans] == [1]


def test_an_unknown_credit_is_named() -> None:
    with pytest.raises(PluginError, match="identicall"):
        LightningRL(credit="identicall").batch([make_group([1.0, 0.0])])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(DataError, match="rollout group-0/1 attempt 1 has the reward"):
        LightningRL().batch([make_group([1.0, reward])])


def with_flaw(group: Group, index: int, **changes: object) -> Group:
    """The group with the last call of one rollout changed."""
    members = list(group.trajectories)
    *before, last = members[index].transitions
    members[index] = replace(members[index], transitions=(*before, replace(last, **changes)))  # type: ignore[arg-type]
    return Group(group.id, tuple(members))


FLAWS = [
    ({"response_ids": token_ids([-7, 4])}, "bad_token_id", "its response has token id -7"),
    ({"prompt_ids": token_ids([1, -2])}, "bad_token_id", "its prompt has token id -2"),
    ({"response_ids": token_ids([5, 6, 7])}, "lengths_differ", "it has 3 response tokens but 2 logprobs"),
    ({"logprobs": logprobs([-1.0])}, "lengths_differ", "it has 2 response tokens but 1 logprobs"),
    ({"logprobs": logprobs([-1.0, float("nan")])}, "logprob_not_finite", "a logprob is not finite"),
    ({"logprobs": logprobs([-float("inf"), -1.0])}, "logprob_not_finite", "a logprob is not finite"),
    ({"prompt_ids": token_ids()}, "no_prompt", "it has no prompt"),
    ({"temperature": float("nan")}, "bad_temperature", "its temperature is nan"),
    ({"versions": ()}, "bad_versions", "its policy versions do not begin"),
    ({"versions": (VersionRun(0, 0), VersionRun(-1, 1))}, "bad_versions", "its policy versions do not begin"),
]


@pytest.mark.parametrize(("changes", "reason", "problem"), FLAWS)
def test_one_odd_call_drops_its_rollout_and_not_the_run(
    changes: dict[str, object], reason: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error here would end the run, and every resume: the recorded call stays what it is."""
    odd = with_flaw(make_group([1.0, 0.5, 0.0], calls=TWO_CALLS, group="odd"), 1, **changes)
    sound = make_group([1.0, 0.0], calls=TWO_CALLS, group="sound")
    with caplog.at_level(logging.WARNING):
        batch = LightningRL("dr_grpo").batch([odd, sound])
    assert batch.dropped == {reason: 1}
    assert batch.skipped == {}
    assert [rollout.id for rollout in batch.used] == ["odd/0", "odd/2", "sound/0", "sound/1"]
    assert [float(row.advantages[-1]) for row in batch.samples] == [0.5, -0.5, 0.5, -0.5]
    (record,) = caplog.records
    assert f"the first: rollout odd/1 attempt 1 call 1 cannot be trained on: {problem}" in record.getMessage()


def test_what_is_left_of_a_group_is_what_it_would_be_without_the_dropped_rollout() -> None:
    odd = with_flaw(make_group([1.0, 0.7, 0.0]), 1, logprobs=logprobs([float("nan")]))
    without = Group(odd.id, (odd.trajectories[0], odd.trajectories[2]))
    for one, other in zip(LightningRL().batch([odd]).samples, LightningRL().batch([without]).samples, strict=True):
        assert one.advantages.tobytes() == other.advantages.tobytes()
        assert one.weights.tobytes() == other.weights.tobytes()


def test_dropped_rollouts_are_counted_by_reason_and_each_reason_names_one(caplog: pytest.LogCaptureFixture) -> None:
    groups = []
    for name in "ab":
        group = with_flaw(make_group([1.0, 0.5, 0.0], group=name), 0, logprobs=logprobs([float("inf")]))
        groups.append(with_flaw(group, 2, prompt_ids=token_ids()))
    with caplog.at_level(logging.WARNING):
        batch = LightningRL().batch(groups)
    assert batch.dropped == {"logprob_not_finite": 2, "no_prompt": 2}
    assert batch.skipped == {"too_few_trainable": 2}
    assert (batch.samples, batch.used) == ((), ())
    assert [record.getMessage().partition(" cannot")[0] for record in caplog.records] == [
        "2 rollouts are left out (logprob_not_finite); the first: rollout a/0 attempt 1 call 0",
        "2 rollouts are left out (no_prompt); the first: rollout a/2 attempt 1 call 0",
    ]


def test_an_odd_call_outside_the_component_of_interest_does_not_matter() -> None:
    group = with_flaw(make_group([1.0, 0.0], calls=TWO_CALLS), 0, logprobs=logprobs([float("nan")]))
    members = tuple(replace(member, trainable=(True, False)) for member in group.trajectories)
    batch = LightningRL().batch([Group(group.id, members)])
    assert (len(batch.used), batch.dropped) == (2, {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "not_finite"), (float("inf"), "not_finite"), (1e39, "too_large"), (-1e19, "too_large")],
)
def test_an_advantage_that_cannot_be_trained_on_skips_its_group(
    value: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def credit(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        last = value if group.id == "odd" else -1.0
        return [np.array([1.0, 1.0]), np.array([1.0, last])]

    groups = [make_group([1.0, 0.0], calls=TWO_CALLS, group=name) for name in ("odd", "sound")]
    with caplog.at_level(logging.WARNING):
        batch = LightningRL(credit=credit).batch(groups)
    assert batch.skipped == {f"advantage_{reason}": 1}
    assert {rollout.group for rollout in batch.used} == {"sound"}
    assert "group odd is left out: the advantage of rollout odd/1 attempt 1 call 1 is" in caplog.text
    members = tuple(replace(member, trainable=(True, False)) for member in groups[0].trajectories)
    assert LightningRL(credit=credit).batch([Group("odd", members)]).skipped == {}  # nobody trains on that one


def test_returns_that_overflow_skip_their_group() -> None:
    group = make_group([1.7e308, -1.7e308], group="odd")
    assert LightningRL("dr_grpo").batch([group]).skipped == {"advantage_too_large": 1}


def test_credit_that_does_not_cover_every_call_is_refused() -> None:
    def short(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        return [np.array([1.0]) for _ in group.trajectories]

    with pytest.raises(DataError, match="credit must give one advantage for each call"):
        LightningRL(credit=short).batch([make_group([1.0, 0.0], calls=TWO_CALLS)])


def test_loss_has_the_algorithms_bounds() -> None:
    assert LightningRL(clip_low=0.1, clip_high=0.3, entropy_coefficient=0.5).loss == ClippedPolicyGradient(
        0.1, 0.3, 0.5
    )


def test_it_is_made_again_from_its_name_and_fields() -> None:
    algorithm = LightningRL("rloo", group_size=4, credit="discounted", normalization="token-mean")
    described = json.loads(json.dumps(describe_algorithm(algorithm)))
    assert {item.name for item in dataclasses.fields(algorithm)} == described["arguments"].keys()
    assert plugins().algorithm(algorithm.name)(**described["arguments"]) == algorithm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low_level": "grop"}, "unknown low_level 'grop'.*did you mean 'grpo'"),
        ({"normalization": "token_mean"}, "did you mean 'token-mean'"),
        ({"group_size": 1}, "group_size=1"),
        ({"low_level": "reinforce++", "group_size": 0}, "group_size=0"),
        ({"correction": "iecpop"}, "did you mean 'icepop'"),
        ({"kl_estimator": "k4"}, "unknown kl_estimator 'k4'"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient=nan"),
        ({"value_coefficient": -1.0}, "value_coefficient=-1"),
        ({"entropy_coefficient": float("inf")}, "entropy_coefficient=inf"),
        ({"clip_low": 1.5}, "cannot be clipped"),
        ({"clip_high": -0.1}, "cannot be clipped"),
        ({"constant_tokens": 0}, "constant_tokens=0"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL(**fields)  # type: ignore[arg-type]


def test_a_whole_number_is_one_however_it_is_written() -> None:
    made = [LightningRL("grpo", group_size=size).group_size for size in (4, 4.0, np.int64(4))]  # type: ignore[arg-type]
    assert [(type(size), size) for size in made] == [(int, 4)] * 3


def test_failed_rollouts_are_absent_not_zero() -> None:
    rewards = [1.0, 0.5]
    with_failure = LightningRL("dr_grpo", group_size=3).batch([make_group(rewards)])
    assert [float(row.advantages[-1]) for row in with_failure.samples] == [0.25, -0.25]


@pytest.mark.parametrize("low_level", PRESETS)
def test_an_idle_rollout_is_in_no_baseline_and_counted(low_level: LowLevel) -> None:
    """One that called no model at all: what it earned is no policy's doing."""
    if low_level == "ppo":
        return  # a critic compares no rollouts
    idle, others = make_trajectory([], rollout="g/x", reward=100.0), make_group([1.0, 0.5])
    algorithm = LightningRL(low_level)
    batch, alone = algorithm.batch([Group("g", (idle, *others.trajectories))]), algorithm.batch([others])
    assert [row.advantages.tolist() for row in batch.samples] == [row.advantages.tolist() for row in alone.samples]
    assert (batch.dropped, alone.dropped) == ({"idle": 1}, {})


def test_where_all_are_idle_nothing_is_trained_and_said_so() -> None:
    idle = tuple(make_trajectory([], rollout=f"g/{index}", reward=float(index)) for index in range(2))
    batch = LightningRL("grpo", group_size=2).batch([Group("g", idle)])
    assert (batch.skipped, batch.dropped) == ({"nothing_to_train": 1}, {"idle": 2})
    one = (idle[0], make_group([1.0]).trajectories[0])
    assert LightningRL("grpo").batch([Group("g", one)]).skipped == {"too_few_trainable": 1}


def test_calls_of_other_agents_are_calls() -> None:
    """A rollout in which the trained agent was not asked is compared with; `per_agent` compares an agent with itself."""
    other = make_trajectory(rollout="g/x", reward=0.0, trainable=(False,))
    batch = LightningRL("dr_grpo").batch([Group("g", (other, *make_group([1.0, 0.5]).trajectories))])
    assert [float(row.advantages[-1]) for row in batch.samples] == [0.5]
    assert not batch.dropped
