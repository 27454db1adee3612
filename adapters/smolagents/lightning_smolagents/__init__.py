"""Adapter for smolagents: names callers by agent and tool, and reports tool runs and runs of an agent's code.

The invariant: it only listens, in the place of smolagents' own methods, but for tools with a limit (`runner.tool_limits`),
which wait for their turn; the undo puts the very methods back.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import by_type, check_supported

from lightning_smolagents.methods import installations, scopes

__all__ = ["SUPPORTED", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"smolagents": ("1.26", "2")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {
    "smolagents.AgentMaxStepsError": "max_turns",
    "smolagents.AgentParsingError": "malformed_output",
    "smolagents.AgentToolCallError": "malformed_output",
}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Stand before the methods that run agents, tools, code and models. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The model call that is under way, else the agent or tool whose code is running."""
    return scopes.caller()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What smolagents' exceptions tell of the model."""
    return by_type(error, POLICY_FAULTS)
