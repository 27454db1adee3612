"""Adapter for LangChain and LangGraph: names callers by agent, node, tool and `run_name`, and reports tool runs.

The invariant: it only listens, through LangChain's own callbacks, but for tools with a limit (`runner.tool_limits`), which wait
for their turn; after the undo LangChain calls nothing of it. It is there without a line of the user's; `LightningCallback()` in
a call's `callbacks` does the same where it is not, without limits.
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
"""Exceptions that tell of the model's own fault, by package and class; see `FrameworkAdapter`."""

adapter = FrameworkAdapter(SUPPORTED, installations, caller_now, lambda error: by_type(error, POLICY_FAULTS))
"""Hears every run of LangChain; names the model call that is under way, else the node or tool whose code is running."""
