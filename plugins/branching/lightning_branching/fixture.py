"""The pytest fixture `replayed`, which makes a recorded rollout a regression test of an agent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lightning.asyncio_utils import outside_of_loops
from lightning.runner.protocol import Agent

from lightning_branching.replay import ReplayResult
from lightning_branching.replay_command import find


@pytest.fixture
def replayed() -> Callable[..., ReplayResult]:
    """A function that runs an agent again on a recorded rollout and returns the `ReplayResult`.

    `replayed(rollout, agent, runs="runs", same=True, recorded_tools=True, until=None)`: `runs` is a folder of runs, a run's
    folder, a database file or a store's URL. The test fails if the replay differs from the record, unless `same` is false.
    Raises `ConfigError` for a rollout that no store has, and `DataError` for one that cannot be replayed.
    """
    return _replayed


def _replayed(
    rollout: str, agent: Agent, *, runs: str = "runs", same: bool = True, recorded_tools: bool = True, **how: Any
) -> ReplayResult:
    found = outside_of_loops(partial(find, runs, rollout, with_tools=recorded_tools))
    result = found.replay(agent, recorded_tools=recorded_tools, **how)
    if same and not result.same:
        raise AssertionError(str(result))
    return result
