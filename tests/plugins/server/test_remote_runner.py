"""What a trainer whose agents run in clients says of settings that are the clients' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from lightning.config.plugin_settings import Config, RunnerConfig
from lightning.types import LLM, Task
from lightning_server.remote_runner import remote_runner


def agent(task: Task, llm: LLM) -> float:
    return 1.0


@pytest.mark.parametrize("sandboxed", ["none", "bwrap"])
def test_a_sandbox_for_agents_of_clients_is_theirs(
    sandboxed: Literal["none", "bwrap"], caplog: pytest.LogCaptureFixture
) -> None:
    remote_runner(agent, Config(runner=RunnerConfig(sandbox=sandboxed)))
    assert ("lightning runner --set runner.sandbox=bwrap" in caplog.text) == (sandboxed == "bwrap")


@pytest.mark.parametrize("limits", [{}, {"browser": 1, "web search": 2}])
def test_limits_for_agents_of_clients_are_theirs(limits: dict[str, int], warnings_of: Callable[[], list[str]]) -> None:
    remote_runner(agent, Config(runner=RunnerConfig(tool_limits=limits)))
    cure = """--set runner.tool_limits='{browser = 1, "web search" = 2}'"""
    assert [cure in said for said in warnings_of()] == [True] * bool(limits)
