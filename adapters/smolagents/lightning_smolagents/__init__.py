"""Adapter for smolagents: names callers by agent and tool, and reports tool runs and runs of an agent's code.

The invariant: it only listens, by wrapping smolagents' own methods; only tools with a limit (`runner.tool_limits`) wait for a
slot. The undo puts the original methods back.
"""

from __future__ import annotations

from lightning.instrument import FrameworkAdapter, by_type

from lightning_smolagents.methods import installations, scopes

__all__ = ["SUPPORTED", "adapter"]

SUPPORTED = {"smolagents": ("1.26", "2")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {
    "smolagents.AgentMaxStepsError": "max_turns",
    "smolagents.AgentParsingError": "malformed_output",
    "smolagents.AgentToolCallError": "malformed_output",
}
"""Exceptions that mean a fault of the model, by package and class; see `FrameworkAdapter`."""

adapter = FrameworkAdapter(SUPPORTED, installations, scopes.caller, lambda error: by_type(error, POLICY_FAULTS))
"""The adapter. It names the present model call, else the agent or tool whose code is running."""
