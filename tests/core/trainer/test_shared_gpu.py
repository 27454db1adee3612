"""One GPU for trainer and vLLM: vLLM sleeps while a step is taken. The GPU is a setting here; what is held is the order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.errors import PolicyServerError

CUDA = {"policy_server__device": "cuda", "trainer__eval_every": 0}


@pytest.fixture
def recorded() -> Callable[[Any], list[str]]:
    """Has a bench's policy server and engine note what they do, one after another."""

    def record(made: Any) -> list[str]:
        told: list[str] = []

        def noting(owner: Any, name: str, *, asleep: bool) -> None:
            original = getattr(owner, name, None)

            async def nothing() -> None:
                told.append(name)

            def step(*args: Any) -> Any:
                told.append(name)
                return original(*args)  # type: ignore[misc]

            setattr(owner, name, nothing if asleep else step)

        noting(made.policy, "sleep", asleep=True)
        noting(made.policy, "wake", asleep=True)
        noting(made.engine, "values", asleep=False)
        noting(made.engine, "step", asleep=False)
        noting(made.engine, "weights", asleep=False)
        return told

    return record


async def test_it_sleeps_for_each_step_and_no_longer(
    bench: Any, tmp_path: Path, recorded: Callable[[Any], list[str]]
) -> None:
    async with bench(tmp_path, **CUDA) as made:
        told = recorded(made)
        await made.loop.run({})
    steps = told.count("step")
    assert steps >= 2
    assert "".join(told).count("sleepstepwakeweights") == steps


async def test_it_sleeps_while_the_critic_values_states(
    bench: Any, tmp_path: Path, recorded: Callable[[Any], list[str]]
) -> None:
    async with bench(tmp_path, algorithm=LightningRL("ppo", group_size=2), **CUDA) as made:
        told = recorded(made)
        await made.loop.run({})
    assert "".join(told).count("sleepvaluesstepwake") == told.count("values") > 0


async def test_a_step_that_fails_leaves_it_awake(
    bench: Any, tmp_path: Path, recorded: Callable[[Any], list[str]]
) -> None:
    async with bench(tmp_path, **CUDA) as made:
        told = recorded(made)

        def fails(*_: Any) -> None:
            raise PolicyServerError("out of memory")

        made.engine.step = fails
        with pytest.raises(PolicyServerError, match="out of memory"):
            await made.loop.run({})
        assert told == ["sleep", "wake"]


async def test_one_that_died_before_a_step_sleeps_once_it_is_back(
    bench: Any, tmp_path: Path, recorded: Callable[[Any], list[str]]
) -> None:
    async with bench(tmp_path, **CUDA) as made:
        told, stack = recorded(made), made.loop.stack
        sleep = made.policy.sleep

        async def died() -> None:
            made.policy.sleep = sleep
            stack.restarts += 1  # as the supervisor does
            raise PolicyServerError("nobody listens")

        made.policy.sleep = died
        async with stack.resting():
            assert told == ["sleep"]
        assert told == ["sleep", "wake"]


@pytest.mark.parametrize("settings", [{}, {**CUDA, "trainer__max_staleness": 1}, {**CUDA, "engine__device": "cuda:1"}])
async def test_nobody_sleeps_where_both_have_their_own_or_compute_at_once(
    bench: Any, tmp_path: Path, recorded: Callable[[Any], list[str]], settings: dict[str, Any]
) -> None:
    async with bench(tmp_path, **settings) as made:
        told = recorded(made)
        await made.loop.run({})
    assert "step" in told
    assert not {"sleep", "wake"} & set(told)
