"""Adapter for DSPy: names callers by the attributes of the program, by module and tool, and reports tool runs.

The invariant: it only listens, in the place of DSPy's own methods, but for tools with a limit (`runner.tool_limits`), which
wait for their turn; what the model reads of a tool's error is what it would read without the adapter. The undo puts the very
methods back.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import by_type, check_supported

from lightning_dspy.methods import installations, scopes

__all__ = ["SUPPORTED", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"dspy": ("3.4", "3.5")}
"""Distribution -> (first version this works with, first that it does not)."""

POLICY_FAULTS = {
    "dspy.AdapterParseError": "malformed_output",
    "dspy.ContextWindowExceededError": "context_overflow",
}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Stand before the methods that run modules, LMs and tools. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The model call that is under way, else the module or tool whose code is running."""
    return scopes.caller()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What DSPy's exceptions tell of the model."""
    return by_type(error, POLICY_FAULTS)
