"""Adapter for DSPy: names callers by the attributes of the program, by module and tool, and reports tool runs.

The invariant: it only listens, in the place of DSPy's own methods, but for tools with a limit (`runner.tool_limits`), which
wait for their turn; what the model reads of a tool's error is what it would read without the adapter. The undo puts the very
methods back.
"""

from __future__ import annotations

from lightning.instrument import FrameworkAdapter, by_type

from lightning_dspy.methods import installations, scopes

__all__ = ["SUPPORTED", "adapter"]

SUPPORTED = {"dspy": ("3.4", "3.5")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {
    "dspy.AdapterParseError": "malformed_output",
    "dspy.ContextWindowExceededError": "context_overflow",
}
"""Exceptions that tell of the model's own fault, by package and class; see `FrameworkAdapter`."""

adapter = FrameworkAdapter(SUPPORTED, installations, scopes.caller, lambda error: by_type(error, POLICY_FAULTS))
"""Names the model call that is under way, else the module or tool whose code is running."""
