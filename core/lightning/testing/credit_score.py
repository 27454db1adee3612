"""How near a credit function comes to the true advantages of a decision task, and what that does to the policy gradient.

The invariant: a score is a property of the credit and the task. Sampling noise is in the score only where it is meant to be
(`correlation`, `variance`, `cosine`: what a step has to live with); it is taken out of `bias`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning.credit.advantage import rloo
from lightning.credit.protocol import Credit, GroupAdvantage
from lightning.errors import ConfigError, DataError
from lightning.testing.decision_trees import TreeSampling, independent, sample_tree
from lightning.testing.decisions import DecisionTask, Floats, SampledGroup, Truth, sample_group


@dataclass(frozen=True, slots=True)
class CreditScore:
    """How good a credit's advantages are on a task. Gradients are with respect to one logit for each action of each state,
    and every call counts alike: no clipping, no normalisation by tokens."""

    correlation: float
    """Pearson's, between given and true advantages over all trained calls; 0 when the given ones are all the same."""
    slope: float
    """Of the given advantages on the true ones, by least squares: 1 when a better action gets that much more."""
    bias: float
    """0 to 1: what part of the truth remains after the *expected* gradient, at its best scale, is taken away. With Â(s, a)
    the expected gradient per visit (the mean advantage of action a in state s, less that of the state) it is
    min over c >= 0 of ||c Â - A|| / ||A||, weighted by visits: the sine of the angle between them. Noise is
    removed by multiplying the means of two halves of the groups."""
    variance: float
    """The summed variance of one group's gradient over the squared length of its expectation: so many groups have to be
    averaged until noise is as long as signal. Infinite when there is no signal."""
    cosine: float
    """Between one group's gradient and the true one, averaged over groups; 0 for a group whose gradient is 0."""
    calls: float
    """How many calls a group sampled, on average."""


def score_credit(
    credit: Credit,
    task: DecisionTask,
    *,
    groups: int = 400,
    group_size: int = 8,
    seed: int = 0,
    advantage: GroupAdvantage = rloo,
    value_error: float = 0.0,
    tree: TreeSampling | None = None,
) -> CreditScore:
    """Sample groups of a task and compare the credit's advantages with the true ones.

    `advantage` is the low level's estimator. Credits that read `Trajectory.values` are given the exact value of each state
    plus a normal error of deviation `value_error`, drawn once for each state: a critic errs in the same way each time.
    With `tree`, a group has fewer independent rollouts and branches of them, for about as many calls (`CreditScore.calls`)
    as `group_size` rollouts make.
    Raises `DataError` when the credit does not give one finite number for each call.
    """
    scores = score_credits(
        {"credit": credit},
        task,
        groups=groups,
        group_size=group_size,
        seed=seed,
        advantage=advantage,
        value_error=value_error,
        tree=tree,
    )
    return scores["credit"]


def score_credits(
    named: Mapping[str, Credit],
    task: DecisionTask,
    *,
    groups: int = 400,
    group_size: int = 8,
    seed: int = 0,
    advantage: GroupAdvantage = rloo,
    value_error: float = 0.0,
    tree: TreeSampling | None = None,
) -> dict[str, CreditScore]:
    """Score several credits on the same rollouts, as `score_credit` does one."""
    if groups < 2:
        raise ConfigError(f"groups={groups}: the score needs at least 2")
    truth = task.truth()
    if not truth.gradient.any():
        raise ConfigError(f"{task.name}: none of the trained decisions makes a difference, so there is nothing to find")
    rng = np.random.default_rng(seed)
    values = truth.values + value_error * rng.standard_normal(len(truth.values))
    names = [f"group-{number}" for number in range(groups)]
    if tree is None:
        sampled = [sample_group(task, group_size, rng, name=name, values=values) for name in names]
    else:
        sampled = [sample_tree(task, group_size, tree, rng, name=name, values=values) for name in names]
    return {name: _score(truth, _calls(credit, sampled, advantage), sampled) for name, credit in named.items()}


def _calls(credit: Credit, sampled: Sequence[SampledGroup], advantage: GroupAdvantage) -> Floats:
    """The advantages of all calls of all groups, flat."""
    parts: list[Floats] = []
    for each in sampled:
        given = [np.asarray(part, dtype=np.float64) for part in credit(each.group, advantage)]
        shapes = [part.shape for part in given]
        if shapes != [own.shape for own in each.states] or not all(np.isfinite(part).all() for part in given):
            raise DataError(
                f"the credit gave arrays of the shapes {shapes} for rollouts of {[len(own) for own in each.states]} calls, "
                "or a number that is not finite: it must give one finite advantage for each call"
            )
        parts.extend(given)
    return np.concatenate(parts)


def _score(truth: Truth, given: Floats, sampled: Sequence[SampledGroup]) -> CreditScore:
    groups, rollouts = len(sampled), independent(sampled[0].group.trajectories)
    states = np.concatenate([own for each in sampled for own in each.states])
    actions = np.concatenate([own for each in sampled for own in each.actions])
    number = np.repeat(np.arange(groups), [sum(map(len, each.states)) for each in sampled])
    kept = truth.trained[states]
    states, actions, given, number = states[kept], actions[kept], given[kept], number[kept]
    correlation, slope = _regression(given, truth.advantages[states, actions])
    gradients = np.zeros((groups, *truth.policy.shape))
    np.add.at(gradients, (number, states, actions), given)
    total = np.zeros((groups, len(truth.policy)))
    np.add.at(total, (number, states), given)
    gradients = ((gradients - total[:, :, None] * truth.policy) / rollouts).reshape(groups, -1)
    true, weights = truth.gradient.ravel(), (truth.visits[:, None] * truth.policy).ravel()
    lengths = np.linalg.norm(gradients, axis=1) * np.linalg.norm(true)
    cosines = np.divide(gradients @ true, lengths, out=np.zeros(groups), where=lengths > 0)
    one, other = gradients[::2].mean(axis=0), gradients[1::2].mean(axis=0)
    signal = float(one @ other)
    noise = float(gradients.var(axis=0, ddof=1).sum())
    return CreditScore(
        correlation,
        slope,
        _bias(one, other, true, weights),
        noise / signal if signal > 0 else float("inf"),
        float(cosines.mean()),
        sum(len(own) for each in sampled for own in each.states) / groups,
    )


def _regression(given: Floats, true: Floats) -> tuple[float, float]:
    """Pearson's correlation, and the slope of the given on the true advantages."""
    given, true = given - given.mean(), true - true.mean()
    common, own, others = float(given @ true), float(given @ given), float(true @ true)
    if others == 0.0:
        return 0.0, 0.0
    return (common / math.sqrt(own * others) if own > 1e-24 * len(given) else 0.0), common / others


def _bias(one: Floats, other: Floats, true: Floats, weights: Floats) -> float:
    """The sine of the angle between expected and true gradient, in the metric of visits; 1 beyond a right angle."""
    seen = weights > 0
    one, other, true = (part[seen] / np.sqrt(weights[seen]) for part in (one, other, true))
    along, across = float(one @ true), float(other @ true)
    length = float(one @ other)
    if length <= 0 or along <= 0 or across <= 0:
        return 1.0
    return math.sqrt(max(0.0, 1.0 - along * across / (length * float(true @ true))))
