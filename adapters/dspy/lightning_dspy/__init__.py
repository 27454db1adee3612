"""Adapter for DSPy: names callers by the attributes of the program, by module and tool, and reports tool runs.

The invariant: it only listens, by wrapping DSPy's own methods; only tools with a limit (`runner.tool_limits`) wait for a slot.
The model reads the same text of a tool's error as without the adapter. The undo puts the original methods back.
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
"""Exceptions that mean a fault of the model, by package and class; see `FrameworkAdapter`."""

adapter = FrameworkAdapter(SUPPORTED, installations, scopes.caller, lambda error: by_type(error, POLICY_FAULTS))
"""The adapter. It names the present model call, else the module or tool whose code is running."""
