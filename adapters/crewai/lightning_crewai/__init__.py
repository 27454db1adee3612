"""Adapter for CrewAI: names callers by role, task, flow and tool, reports tool runs, and keeps CrewAI's telemetry off.

The invariant: it only listens, in the place of CrewAI's own methods; the undo puts the very ones back.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import by_type, check_supported

from lightning_crewai.methods import caller_now, installations

__all__ = ["SUPPORTED", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"crewai": ("1.15.10", "2")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {
    "crewai.OutputParserError": "malformed_output",
    "crewai.ConverterError": "malformed_output",
    "crewai.LLMContextLengthExceededError": "context_overflow",
}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""

FAULTS_BY_TEXT = (
    "Invalid response from LLM call - None or empty",
    "Task failed guardrail",
    "Agent's guardrail failed validation",
)
"""How the texts of errors begin that tell of an answer which is not what was asked for; their classes are Python's own."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Stand before the methods that run agents, tasks, flows and tools. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The model call that is under way, else the agent, flow or tool whose code is running."""
    return caller_now()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What CrewAI's exceptions tell of the model."""
    return "malformed_output" if str(error).startswith(FAULTS_BY_TEXT) else by_type(error, POLICY_FAULTS)
