"""Adapter for LlamaIndex: names callers by agent, workflow step, component and tool, and reports tool runs.

The invariant: it only listens, through LlamaIndex's own instrumentation; the undo takes its one span handler away.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import by_type, check_supported

from lightning_llama_index.spans import installations
from lightning_llama_index.steps import steps

__all__ = ["SUPPORTED", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"llama-index-core": ("0.14.25", "0.15"), "llama-index-workflows": ("2.20", "3")}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""

POLICY_FAULTS = {"llama_index.OutputParserException": "malformed_output"}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""
FAULTS_BY_TEXT = {
    "Max iterations of ": {"workflows.WorkflowRuntimeError": "max_turns"},
    "Expected at least one tool call": {"builtins.ValueError": "malformed_output"},
    "Failed to convert output to JSON": {"builtins.ValueError": "malformed_output"},
    "Could not extract json string from output": {"builtins.ValueError": "malformed_output"},
}
"""The same of classes that tell of other faults too, by how the error's text begins."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Hear of every span of LlamaIndex from now on. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The model call that is under way, else the agent, step, component or tool whose code is running."""
    return steps.caller()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What LlamaIndex's exceptions tell of the model."""
    text = str(error)
    by_text = next((table for start, table in FAULTS_BY_TEXT.items() if text.startswith(start)), {})
    return by_type(error, POLICY_FAULTS) or by_type(error, by_text)
