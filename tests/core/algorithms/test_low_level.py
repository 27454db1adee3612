"""The low levels: what each preset is made of, what fields override, and normalisation over the whole step."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel, estimator_of, whiten
from lightning.algorithms.spec import make_algorithm, parse_algorithms
from lightning.batch.trajectory import Trajectory
from lightning.errors import ConfigError
from lightning.losses.correction import Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient, SequencePolicyGradient
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.trainer.runs import describe_algorithm

# name: advantages of the returns (1, 0, 0), loss, weights, and whether equal returns teach
TABLE = {
    "grpo": ((2, -1, -1), "clip", (0.2, 0.2), "rollout-mean", False),
    "dr_grpo": ((2 / 3, -1 / 3, -1 / 3), "clip", (0.2, 0.2), "constant", False),
    "dapo": ((2, -1, -1), "clip", (0.2, 0.28), "token-mean", False),
    "gspo": ((2, -1, -1), "gspo", (3e-4, 4e-4), "sequence-mean", False),
    "cispo": ((2, -1, -1), "cispo", (1.0, 4.0), "token-mean", False),
    "rloo": ((1, -1 / 2, -1 / 2), "clip", (0.2, 0.2), "rollout-mean", False),
    "reinforce++": ((1, 0, 0), "clip", (0.2, 0.2), "rollout-mean", True),
    "reinforce++_baseline": ((2 / 3, -1 / 3, -1 / 3), "clip", (0.2, 0.2), "rollout-mean", False),
    "ppo": ((1, 0, 0), "clip", (0.2, 0.2), "token-mean", True),
}


def test_the_table_has_every_low_level() -> None:
    assert set(TABLE) == set(PRESETS) == set(get_args(LowLevel))


@pytest.mark.parametrize("name", TABLE)
def test_what_a_low_level_is_made_of(name: LowLevel) -> None:
    advantages, loss, bounds, normalization, equal_teaches = TABLE[name]
    algorithm = LightningRL(name)
    found = estimator_of(algorithm.estimator, algorithm.scaling, 0.0)(np.array([1.0, 0.0, 0.0]))
    scale = np.sqrt(3) if algorithm.scaling == "group-std" else 1.0
    np.testing.assert_allclose(found * scale, advantages, atol=1e-12)
    assert (algorithm.clip_low, algorithm.clip_high) == bounds
    assert algorithm.normalization == normalization
    kind = SequencePolicyGradient if loss == "gspo" else ClippedPolicyGradient
    assert algorithm.loss == kind(*bounds, surrogate="cispo" if loss == "cispo" else "clip")
    assert algorithm.teaches(make_group([0.5, 0.5])) is equal_teaches
    assert algorithm.teaches(make_group([0.5])) is equal_teaches
    assert algorithm.teaches(make_group([0.5, 0.0]))
    assert algorithm.dynamic_sampling is (name == "dapo")
    assert bool(algorithm.head) is (name == "ppo")
    assert (algorithm.scaling == "batch-std") is (name in ("reinforce++", "reinforce++_baseline", "ppo"))


@pytest.mark.parametrize("name", TABLE)
def test_each_is_a_plugin_that_a_runs_record_makes_again(name: LowLevel) -> None:
    algorithm = plugins().algorithm(name)(group_size=4)
    assert algorithm == LightningRL(name, group_size=4)
    described = json.loads(json.dumps(describe_algorithm(algorithm)))
    assert plugins().algorithm(described["name"])(**described["arguments"]) == algorithm


@pytest.mark.parametrize("name", TABLE)
def test_given_fields_win(name: LowLevel) -> None:
    given = {"clip_low": 0.0, "clip_high": 0.5, "normalization": "sequence-mean", "dynamic_sampling": name != "dapo"}
    algorithm = LightningRL(
        name, **given, kl_coefficient=0.1, kl_estimator="k3", correction="tis", entropy_coefficient=0.5
    )
    assert {field: getattr(algorithm, field) for field in given} == given
    loss = ClippedPolicyGradient(0.0, 0.5, 0.5, "cispo" if name == "cispo" else "clip", 0.1, "k3", Correction("tis"))
    assert algorithm.loss == loss
    assert loss.needs_reference


@pytest.mark.parametrize("name", ["gspo", "cispo", "dapo"])
def test_any_low_level_takes_the_advantage_of_another(name: LowLevel) -> None:
    group = make_group([1.0, 0.0, 0.0, 0.25])
    mixed, rloo = LightningRL(name, estimator="rloo"), LightningRL("rloo", normalization=PRESETS[name].normalization)
    for found, expected in zip(mixed.batch([group]).samples, rloo.batch([group]).samples, strict=True):
        np.testing.assert_array_equal(found.advantages, expected.advantages)
    assert mixed.loss == LightningRL(name).loss
    assert (mixed.scaling, mixed.ratio) == ("none", "sequence" if name == "gspo" else "token")
    described = json.loads(json.dumps(describe_algorithm(mixed)))
    assert plugins().algorithm(described["name"])(**described["arguments"]) == mixed
    (phase,) = parse_algorithms(f"{name}:estimator=rloo")
    assert make_algorithm(phase) == mixed


def test_parts_of_low_levels_compose() -> None:
    assert LightningRL("grpo", ratio="sequence").loss == SequencePolicyGradient(0.2, 0.2)
    assert LightningRL("cispo", ratio="sequence").loss == SequencePolicyGradient(1.0, 4.0, surrogate="cispo")
    assert LightningRL("gspo", ratio="token").loss == ClippedPolicyGradient(3e-4, 4e-4)
    assert LightningRL("gspo", correction="tis").ratio == "token"
    plain = LightningRL("grpo", estimator="none", scaling="none", group_size=1)
    assert plain.batch([make_group([0.75])]).samples[0].advantages[-1] == 0.75
    assert LightningRL("rloo", scaling="batch-std").batch([make_group([1.0, 0.0])]).samples[0].advantages[-1] == (
        pytest.approx(1.0, abs=1e-3)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"estimator": "rloo", "scaling": "group-std"}, "GRPO's advantage times a constant. Set scaling='none'"),
        ({"estimator": "none", "scaling": "group-std"}, "there is no baseline"),
        ({"low_level": "rloo", "scaling": "group-std"}, "times a constant"),
        (
            {"low_level": "ppo", "estimator": "rloo"},
            "values of its head. Leave estimator out .*: make a new LightningRL",
        ),
        ({"credit": "critic", "estimator": "rloo"}, "the credit 'critic' takes advantages from"),
        ({"ratio": "sequence", "correction": "tis"}, "ratio='sequence' has no effect with correction='tis'"),
        ({"estimator": "grpo"}, "unknown estimator 'grpo': use one of mean, rloo, none"),
        ({"scaling": "groupstd"}, "unknown scaling 'groupstd'.*did you mean 'group-std'"),
        ({"ratio": 1}, "unknown ratio 1: use one of token, sequence"),
    ],
)
def test_combinations_without_a_meaning_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LightningRL(**given)


def test_the_record_of_a_run_says_what_the_low_level_decided() -> None:
    arguments = describe_algorithm(LightningRL("dapo"))["arguments"]
    assert arguments["clip_high"] == 0.28  # type: ignore[index, call-overload]
    assert arguments["credit"] == "identical"  # type: ignore[index, call-overload]
    assert None not in [arguments[name] for name in ("normalization", "dynamic_sampling")]  # type: ignore[index, call-overload]


advantage = st.floats(-5, 5).map(lambda value: round(value, 6))
rollouts = st.lists(st.lists(advantage, min_size=1, max_size=4), min_size=2, max_size=6)


def trajectories(calls: list[int]) -> list[Trajectory]:
    return [make_trajectory([((1,), (2,))] * count, rollout=f"r{index}") for index, count in enumerate(calls)]


@given(rollouts)
def test_whitened_rollouts_have_mean_0_and_deviation_1(own: list[list[float]]) -> None:
    found = whiten(trajectories(list(map(len, own))), list(map(np.array, own)), eps=0.0)
    if np.ptp(np.concatenate(own)) < 1e-5:
        return
    assert np.mean([np.mean(values) for values in found]) == pytest.approx(0.0, abs=1e-6)
    assert np.mean([np.square(values).mean() for values in found]) == pytest.approx(1.0, rel=1e-6)


@given(st.lists(advantage, min_size=2, max_size=6), st.integers(1, 5))
def test_calls_that_are_all_alike_count_as_one(own: list[float], copies: int) -> None:
    once = whiten(trajectories([1] * len(own)), [np.array([value]) for value in own], eps=1e-4)
    first = [copies, *[1] * (len(own) - 1)]
    more = whiten(
        trajectories(first), [np.full(count, value) for count, value in zip(first, own, strict=True)], eps=1e-4
    )
    for one, other in zip(once, more, strict=True):
        np.testing.assert_allclose(other, np.full(len(other), one[0]), rtol=1e-9, atol=1e-9)


def test_calls_that_are_not_trained_have_no_say_in_the_mean() -> None:
    one, other = trajectories([2, 1])
    one = dataclasses.replace(one, trainable=(True, False))
    found = whiten([one, other], [np.array([1.0, 1e6]), np.array([-1.0])], eps=0.0)
    assert (found[0][0], found[1][0]) == (1.0, -1.0)


def test_advantages_that_do_not_differ_but_by_rounding_become_0() -> None:
    found = whiten(trajectories([1, 1]), [np.array([0.1 + 0.2]), np.array([0.3])], eps=0.0)
    assert found == [[0.0], [0.0]]
    assert whiten([], [], eps=0.0) == []
