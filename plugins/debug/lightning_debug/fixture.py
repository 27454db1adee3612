"""The pytest fixture `replayed`: a recorded rollout as a regression test of an agent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lightning.runner.protocol import Agent

from lightning_debug.command import find
from lightning_debug.replay import ReplayResult, replay_agent


@pytest.fixture
def replayed() -> Callable[..., ReplayResult]:
    """A function that runs an agent again on a recorded rollout and returns the `ReplayResult`.

    `replayed(rollout, agent, runs="runs", same=True, recorded_tools=True, until=None)`: `runs` is a folder of runs, a run's
    folder, a database file or a store's URL. The test fails where the replay is another rollout, unless `same` is false.
    Raises `ConfigError` for a rollout that is not there, and `DataError` for one that cannot be replayed.
    """
    return _replayed


def _replayed(
    rollout: str, agent: Agent, *, runs: str = "runs", same: bool = True, recorded_tools: bool = True, **how: Any
) -> ReplayResult:
    with ThreadPoolExecutor(1) as apart:  # an event loop may run here, and the store wants its own
        found = apart.submit(find, runs, rollout, with_tools=recorded_tools).result()
    result = replay_agent(
        found.recorded,
        agent,
        recorded_tools=recorded_tools,
        adapters=found.adapters,
        reroute=found.reroute,
        prompts=found.prompts,
        seed=found.seed,
        **how,
    )
    if same and not result.same:
        raise AssertionError(str(result))
    return result
