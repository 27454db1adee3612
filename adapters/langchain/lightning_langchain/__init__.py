"""Adapter for LangChain and LangGraph: names callers by agent, node, tool and `run_name`, and reports tool runs.

The invariant: it only listens, through LangChain's own callbacks, but for tools with a limit (`runner.tool_limits`), which wait
for their turn; after the undo LangChain calls nothing of it. It is there without a line of the user's; `LightningCallback()` in
a call's `callbacks` does the same where it is not, without limits.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import by_type, check_supported

from lightning_langchain.callback import LightningCallback, caller_now, installations

__all__ = ["SUPPORTED", "LightningCallback", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"langchain-core": ("1.2", "2"), "langgraph": ("1.1", "2")}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""


POLICY_FAULTS = {
    "langgraph.GraphRecursionError": "max_turns",
    "langchain.ModelCallLimitExceededError": "max_turns",
    "langchain.ToolCallLimitExceededError": "max_turns",
    "langchain.StructuredOutputError": "malformed_output",
    "langchain_core.OutputParserException": "malformed_output",
}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent | lightning.StepState], None]) -> Callable[[], None]:
    """Hear every run of LangChain from now on. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The model call that is under way, else the node or tool whose code is running."""
    return caller_now()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What LangChain's and LangGraph's exceptions tell of the model."""
    return by_type(error, POLICY_FAULTS)
