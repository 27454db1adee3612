"""Adapter for LangChain and LangGraph: names callers by agent, node, tool and `run_name`, and reports tool runs.

The invariant: it only listens, through LangChain's own callbacks; only tools with a limit (`runner.tool_limits`) wait for a
slot. After the undo LangChain calls nothing of it. It works without a line in the user's code; where it is not installed,
`LightningCallback()` in a call's `callbacks` does the same, without limits.
"""

from __future__ import annotations

from lightning.instrument import FrameworkAdapter, by_type

from lightning_langchain.callback import LightningCallback, caller_now, installations

__all__ = ["SUPPORTED", "LightningCallback", "adapter"]

SUPPORTED = {"langchain-core": ("1.2", "2"), "langgraph": ("1.1", "2")}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""


POLICY_FAULTS = {
    "langgraph.GraphRecursionError": "max_turns",
    "langchain.ModelCallLimitExceededError": "max_turns",
    "langchain.ToolCallLimitExceededError": "max_turns",
    "langchain.StructuredOutputError": "malformed_output",
    "langchain_core.OutputParserException": "malformed_output",
}
"""Exceptions that mean a fault of the model, by package and class; see `FrameworkAdapter`."""

adapter = FrameworkAdapter(SUPPORTED, installations, caller_now, lambda error: by_type(error, POLICY_FAULTS))
"""The adapter. It hears every run of LangChain, and names the present model call, else the node or tool whose code is
running."""
