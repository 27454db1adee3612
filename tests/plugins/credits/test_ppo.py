"""PPO's batches: advantages from the critic's values, and what the critic itself should learn, in the spans."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import head_of
from lightning.batch.sample import Sample, TokenSpan
from lightning.batch.trajectory import Group
from lightning.errors import ConfigError, DataError
from lightning.testing.trajectories import make_group
from lightning.trainer.training_data import batch_digest
from lightning_credits.critic import Critic

CALLS = [((1, 2), (3,)), ((1, 2, 3, 4), (5, 6))]


def valued(group: Group, *values: Sequence[float]) -> Group:
    members = zip(group.trajectories, values, strict=True)
    return Group(group.id, tuple(dataclasses.replace(member, values=tuple(own)) for member, own in members))


GROUPS = [
    valued(make_group([1.0, 1.0], calls=CALLS, group="a"), (0.5, 0.75), (0.25, 0.5)),
    valued(make_group([0.0], calls=CALLS, group="b"), (0.5, 0.25)),
]


def spans(rows: Sequence[Sample]) -> dict[tuple[str, int], TokenSpan]:
    return {(span.rollout, span.seq): span for row in rows for span in row.spans}


def by_hand(gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages and targets of the six calls, in order, by the recursion of arXiv 1506.02438."""
    advantages, targets = [], []
    for reward, (first, second) in [(1.0, (0.5, 0.75)), (1.0, (0.25, 0.5)), (0.0, (0.5, 0.25))]:
        late = reward - second
        early = gamma * second - first + gamma * lam * late
        advantages += [early, late]
        targets += [early + first, late + second]
    return advantages, targets


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_advantages_are_whitened_over_the_step_and_targets_are_not(gamma: float, lam: float) -> None:
    batch = LightningRL("ppo", credit=Critic(gamma, lam), value_coefficient=0.6, advantage_eps=0.0).batch(GROUPS)
    found = spans(batch.samples)
    advantages, targets = by_hand(gamma, lam)
    white = (np.array(advantages) - np.mean(advantages)) / np.std(advantages)
    keys = [(rollout, seq) for rollout in ("a/0", "a/1", "b/0") for seq in (0, 1)]
    assert [found[key].value_target for key in keys] == pytest.approx(targets)
    assert [found[key].value_weight for key in keys] == pytest.approx([0.1] * 6)
    trained = {
        (span.rollout, span.seq): float(row.advantages[span.start]) for row in batch.samples for span in row.spans
    }
    assert [trained[key] for key in keys] == pytest.approx(white.tolist(), rel=1e-5)
    assert batch.skipped == {}


def test_rollouts_that_are_alike_still_teach_the_critic() -> None:
    group = valued(make_group([1.0, 1.0], group="a"), (0.5,), (0.5,))
    batch = LightningRL("ppo").batch([group])
    assert [float(row.advantages[-1]) for row in batch.samples] == [0.0, 0.0]
    assert [span.value_target for span in spans(batch.samples).values()] == [1.0, 1.0]


def test_calls_that_are_not_trained_teach_the_critic_nothing() -> None:
    group = Group("a", tuple(dataclasses.replace(m, trainable=(True, False)) for m in GROUPS[0].trajectories))
    group = valued(group, (0.5, math.nan), (0.25, math.nan))
    batch = LightningRL("ppo", value_coefficient=1.0).batch([group])
    assert {key: span.value_weight for key, span in spans(batch.samples).items()} == {("a/0", 0): 0.5, ("a/1", 0): 0.5}


def test_the_digest_of_a_step_covers_what_the_critic_learns() -> None:
    other = [valued(GROUPS[0], (0.5, 0.75), (0.25, 0.5)), valued(GROUPS[1], (0.5, 0.3))]
    algorithm = LightningRL("ppo", credit=Critic(1.0, 0.0), clip_low=0.1)
    assert batch_digest(algorithm.batch(GROUPS)) == batch_digest(algorithm.batch(GROUPS))
    assert batch_digest(algorithm.batch(GROUPS)) != batch_digest(algorithm.batch(other))


def test_the_critic_learns_the_return_with_all_that_counts_as_reward() -> None:
    """Three trained tokens where two are allowed: both the advantage and the target know of the punishment."""
    algorithm = LightningRL("ppo", credit=Critic(1.0, 1.0), overlong_tokens=2, overlong_penalty=0.5)
    found = spans(algorithm.batch(GROUPS).samples)
    assert [found["a/0", seq].value_target for seq in (0, 1)] == [0.5, 0.5]
    assert [found["b/0", seq].value_target for seq in (0, 1)] == [-0.5, -0.5]


def test_who_wants_a_critic() -> None:
    assert head_of(LightningRL("ppo"))
    assert head_of(LightningRL("grpo", credit="critic"))
    assert not head_of(LightningRL("reinforce++"))
    assert LightningRL("ppo", group_size=1).group_size == 1
    assert LightningRL("grpo", credit=Critic(), group_size=1).teaches(make_group([1.0]))


def test_ppo_without_a_critic_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ppo' needs a credit function that uses a head"):
        LightningRL("ppo", credit="identical")


def test_values_that_were_not_asked_for_are_missed_by_name() -> None:
    with pytest.raises(DataError, match="rollout a/0 has no values"):
        LightningRL("ppo").batch([make_group([1.0, 0.0], group="a")])


def test_a_credit_that_wants_a_critic_has_to_teach_it() -> None:
    class Half:
        head = "critic"

        def __call__(self, group, advantage):
            return [np.ones(len(member.transitions)) for member in group.trajectories]

    with pytest.raises(ConfigError, match=r"has no method value_targets\(trajectory\)"):
        LightningRL(credit=Half()).batch(GROUPS)


@pytest.mark.parametrize(("target", "reason"), [(np.inf, "not_finite"), (1e20, "too_large")])
def test_a_target_that_no_critic_can_learn_skips_its_group_by_name(
    target: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wild(Critic):
        def value_targets(self, trajectory):
            return np.full(len(trajectory.transitions), target if trajectory.rollout.group == "a" else 0.5)

    with caplog.at_level(logging.WARNING):
        batch = LightningRL(credit=Wild()).batch(GROUPS)
    assert batch.skipped == {f"value_target_{reason}": 1}
    assert f"group a is left out: the value target of rollout a/0 attempt 1 call 0 is {target}" in caplog.text
