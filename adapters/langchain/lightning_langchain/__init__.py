"""Adapter for LangChain and LangGraph: names callers by agent, node, tool and `run_name`, and reports tool runs.

The invariant: it only listens, through LangChain's own callbacks, but for tools with a limit (`runner.tool_limits`), which wait
for their turn; after the undo LangChain calls nothing of it. It is there without a line of the user's; `LightningCallback()` in
a call's `callbacks` does the same where it is not, without limits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import lightning
from langchain_core.tracers.context import register_configure_hook
from lightning.instrument import by_type, check_supported, hold_slots

from lightning_langchain.callback import LightningCallback, caller_now, receivers

__all__ = ["SUPPORTED", "LightningCallback", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"langchain-core": ("1.2", "2"), "langgraph": ("1.1", "2")}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""


class _Always:
    """Stands where LangChain expects a context variable, and answers alike in every thread and task."""

    handler: LightningCallback | None = None

    def get(self) -> LightningCallback | None:
        return self.handler


_always = _Always()


@cache
def _register() -> None:
    """LangChain has no way to take a hook back: it stays, and says None while the adapter is not installed."""
    register_configure_hook(cast("ContextVar[Any]", _always), inheritable=True, handle_class=LightningCallback)


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
    _register()
    receivers.append(emit)
    _always.handler = _always.handler or LightningCallback()
    free_tools = hold_slots("langchain_core.tools.base", "BaseTool", ("run", "arun"))

    def undo() -> None:
        free_tools()
        receivers.remove(emit)
        if not receivers:
            _always.handler = None

    return undo


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The model call that is under way, else the node or tool whose code is running."""
    return caller_now()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What LangChain's and LangGraph's exceptions tell of the model."""
    return by_type(error, POLICY_FAULTS)
