"""Adapter for LlamaIndex: names callers by agent, workflow step, component and tool, and reports tool runs.

The invariant: it only listens, through LlamaIndex's own instrumentation; the undo removes its one span handler.
"""

from __future__ import annotations

from lightning.instrument import FrameworkAdapter, by_type

from lightning_llama_index.spans import installations, steps

__all__ = ["SUPPORTED", "adapter"]

SUPPORTED = {"llama-index-core": ("0.14.25", "0.15"), "llama-index-workflows": ("2.20", "3")}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""

POLICY_FAULTS = {"llama_index.OutputParserException": "malformed_output"}
"""Exceptions that mean a fault of the model, by package and class; see `FrameworkAdapter`."""
FAULTS_BY_TEXT = {
    "Max iterations of ": {"workflows.WorkflowRuntimeError": "max_turns"},
    "Expected at least one tool call": {"builtins.ValueError": "malformed_output"},
    "Failed to convert output to JSON": {"builtins.ValueError": "malformed_output"},
    "Could not extract json string from output": {"builtins.ValueError": "malformed_output"},
}
"""The same for classes that also mean other faults, by the beginning of the error's text."""


def _policy_fault(error: BaseException) -> str | None:
    text = str(error)
    by_text = next((table for start, table in FAULTS_BY_TEXT.items() if text.startswith(start)), {})
    return by_type(error, POLICY_FAULTS) or by_type(error, by_text)


adapter = FrameworkAdapter(SUPPORTED, installations, steps.caller, _policy_fault)
"""The adapter. It names the present model call, else the agent, step, component or tool whose code is running."""
