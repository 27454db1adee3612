"""Adapter for the OpenAI Agents SDK: names callers by agent, tool and guardrail, and reports tool runs.

The invariant: the user's own tracing works as before, also when it is disabled. Only the SDK's default exporter, which posts
prompts to OpenAI, sends nothing while the adapter is installed. The undo puts the original provider back.
"""

from __future__ import annotations

from lightning.instrument import FrameworkAdapter, by_type

from lightning_openai_agents.steps import LightningProcessor, caller_here, installations

__all__ = ["SUPPORTED", "LightningProcessor", "adapter"]

SUPPORTED = {"openai-agents": ("0.20", "1")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {"agents.MaxTurnsExceeded": "max_turns", "agents.ModelBehaviorError": "malformed_output"}
"""Exceptions that mean a fault of the model, by package and class; see `FrameworkAdapter`."""


def _policy_fault(error: BaseException) -> str | None:
    if "not found in agent" in str(error) and by_type(error, POLICY_FAULTS) == "malformed_output":
        return "invented_tool"
    return by_type(error, POLICY_FAULTS)


adapter = FrameworkAdapter(SUPPORTED, installations, caller_here, _policy_fault)
"""The adapter. It names the innermost agent, tool or guardrail that runs here, with the present model call."""
