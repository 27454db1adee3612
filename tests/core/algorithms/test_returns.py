"""What counts as reward besides the agent's own: overlong answers, with every low level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.intake import Overlong
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group, trained_tokens
from lightning.errors import ConfigError
from lightning.testing.trajectories import make_trajectory


@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 40))
def test_against_equation_13(tokens: int, longest: int, buffer: int) -> None:
    buffer = min(buffer, longest)
    if tokens <= longest - buffer:
        expected = 0.0
    elif tokens <= longest and buffer:
        expected = ((longest - buffer) - tokens) / buffer
    else:
        expected = -1.0
    assert Overlong(longest, buffer)(tokens) == pytest.approx(expected)
    assert Overlong(longest, buffer, 0.25)(tokens) == pytest.approx(expected / 4)


def group(*lengths: list[int], rewards: tuple[float, ...]) -> Group:
    members = [
        make_trajectory([((1,), tuple(range(2, 2 + length))) for length in own], rollout=f"g/{index}", reward=reward)
        for index, (own, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return Group("g", tuple(members))


def test_all_calls_of_a_rollout_count_together_and_the_record_keeps_its_reward() -> None:
    own = group([4, 4], [2, 2], rewards=(1.0, 0.0))
    algorithm = LightningRL("dr_grpo", overlong_tokens=10, overlong_buffer=4)
    batch = algorithm.batch([own])
    assert [float(row.advantages[-1]) for row in batch.samples if row.weights.any()] == [0.25, 0.25, -0.25, -0.25]
    assert [rollout.reward for rollout in batch.used] == [1.0, 0.0]
    assert float(LightningRL("dr_grpo").batch([own]).samples[0].advantages[-1]) == 0.5


def test_calls_that_are_not_trained_are_nobodys_length() -> None:
    member = make_trajectory([((1,), (2, 3)), ((1,), (4, 5, 6))], trainable=(True, False))
    assert trained_tokens(zip(member.transitions, member.trainable, strict=True)) == 2


@pytest.mark.parametrize("low_level", ["grpo", "rloo", "reinforce++", "gspo"])
def test_it_goes_with_every_low_level(low_level: str) -> None:
    own = group([20], [2], [2], rewards=(1.0, 1.0, 0.0))
    algorithm = LightningRL(low_level, overlong_tokens=10, overlong_penalty=0.75)  # type: ignore[arg-type]
    found = {row.spans[0].rollout: float(row.advantages[-1]) for row in algorithm.batch([own]).samples}
    assert found["g/2"] < found["g/0"] < 0 < found["g/1"]


def test_with_a_normalisation_over_the_step_another_group_tells_rewards_apart() -> None:
    algorithm = LightningRL("reinforce++", overlong_tokens=10, overlong_penalty=0.5)
    right = group([20], [2], rewards=(1.0, 1.0))
    wrong = Group("h", tuple(make_trajectory(rollout=f"h/{index}", reward=0.0) for index in range(2)))
    found = {row.spans[0].rollout: float(row.advantages[-1]) for row in algorithm.batch([right, wrong]).samples}
    assert found["h/0"] < found["g/0"] < found["g/1"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlong_tokens": 0}, "overlong_tokens=0"),
        ({"overlong_tokens": 10, "overlong_buffer": 11}, "overlong_buffer=11"),
        ({"overlong_tokens": 10, "overlong_penalty": -1.0}, "overlong_penalty=-1"),
        ({"overlong_tokens": 10, "overlong_penalty": float("nan")}, "overlong_penalty=nan"),
        ({"overlong_buffer": 4}, r"overlong_buffer=4 without overlong_tokens .*: give overlong_tokens"),
        (
            {"overlong_buffer": 4, "overlong_penalty": 0.5},
            r"overlong_buffer=4 and overlong_penalty=0\.5 without overlong_tokens",
        ),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL(**fields)  # type: ignore[arg-type]
