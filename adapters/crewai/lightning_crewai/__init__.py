"""Adapter for CrewAI: names callers by role, task, flow and tool, reports tool runs, and switches CrewAI's telemetry off.

The invariant: it only listens, by wrapping CrewAI's own methods; the undo puts the original methods back.
"""

from __future__ import annotations

from lightning.instrument import FrameworkAdapter, by_type

from lightning_crewai.methods import caller_now, installations

__all__ = ["SUPPORTED", "adapter"]

SUPPORTED = {"crewai": ("1.15.10", "2")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {
    "crewai.OutputParserError": "malformed_output",
    "crewai.ConverterError": "malformed_output",
    "crewai.LLMContextLengthExceededError": "context_overflow",
}
"""Exceptions that mean a fault of the model, by package and class; see `FrameworkAdapter`."""

FAULTS_BY_TEXT = (
    "Invalid response from LLM call - None or empty",
    "Task failed guardrail",
    "Agent's guardrail failed validation",
)
"""Beginnings of error texts that mean a wrong answer of the model; the classes of these errors are Python's own."""


def _policy_fault(error: BaseException) -> str | None:
    return "malformed_output" if str(error).startswith(FAULTS_BY_TEXT) else by_type(error, POLICY_FAULTS)


adapter = FrameworkAdapter(SUPPORTED, installations, caller_now, _policy_fault)
"""The adapter. It names the present model call, else the agent, flow or tool whose code is running."""
