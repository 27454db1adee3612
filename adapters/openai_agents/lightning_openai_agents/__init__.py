"""Adapter for the OpenAI Agents SDK: names callers by agent, tool and guardrail, and reports tool runs.

The invariant: a user's own tracing goes on as it was, also when it is disabled; only the SDK's default exporter, which posts
prompts to OpenAI, sends nothing while the adapter is installed. The undo puts back the very provider that was there.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import by_type, check_supported

from lightning_openai_agents.steps import LightningProcessor, current_step, installations

__all__ = ["SUPPORTED", "LightningProcessor", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"openai-agents": ("0.20", "1")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {"agents.MaxTurnsExceeded": "max_turns", "agents.ModelBehaviorError": "malformed_output"}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Stand before the SDK's trace provider from now on. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The innermost agent, tool or guardrail that runs here, with the model call that is under way."""
    step = current_step()
    return step.caller() if step else None


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What the SDK's exceptions tell of the model."""
    if "not found in agent" in str(error) and by_type(error, POLICY_FAULTS) == "malformed_output":
        return "invented_tool"
    return by_type(error, POLICY_FAULTS)
