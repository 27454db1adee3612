"""The plugin `branching`, for branches and replays of recorded rollouts: a call stage, an attempt stage, the route for a
branch's tools, the samplers of trees and of prefixes, and two commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import PluginSettings, RunnerConfig
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.runner.stages import AttemptStage
    from lightning.trainer.samplers import Asked, Sampler
    from starlette.types import ASGIApp


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings of trees of rollouts and of prefixes."""
    register("branching", later("lightning_branching.config:BranchingConfig"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stage `branches`."""
    register("branches", made_later("lightning_branching.stage:BranchesStage"))


@hookimpl
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """Register the attempt stage `branches`."""
    from lightning_branching.tools import BRANCHES, BranchToolsStage

    register(BRANCHES, lambda config: BranchToolsStage())


@hookimpl
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """Register the route `GET tool_runs`."""
    register("GET tool_runs", made_later("lightning_branching.stage:ToolRuns"))


@hookimpl
def register_samplers(register: Callable[[str, Callable[[Asked], Sampler | None]], None]) -> None:
    """Register the samplers `tree` and `prefix`."""
    register("tree", made_later("lightning_branching.tree_sampling:tree_sampler"))
    register("prefix", made_later("lightning_branching.prefix_sampling:prefix_sampler"))


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the commands `replay` and `branch`."""
    register(
        "replay",
        later("lightning_branching.replay_command:replay", "Run a recorded rollout again, answered from the record."),
    )
    register(
        "branch",
        later(
            "lightning_branching.branch_command:branch",
            "Run a recorded rollout again from one of its calls on, several times.",
        ),
    )
