"""Adapter for the OpenAI Agents SDK: names callers by agent, tool and guardrail, and reports tool runs.

The invariant: a user's own tracing goes on as it was, also when it is disabled; only the SDK's default exporter, which posts
prompts to OpenAI, sends nothing while the adapter is installed. The undo puts back the very provider that was there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import lightning
from agents.tracing import Trace, TraceProvider, get_trace_provider, set_trace_provider
from agents.tracing.processors import default_exporter, default_processor
from lightning.instrument import by_type, check_supported, hold_slots

from lightning_openai_agents.outcomes import outcomes
from lightning_openai_agents.provider import Provider, current_step
from lightning_openai_agents.steps import LightningProcessor, receivers

__all__ = ["SUPPORTED", "LightningProcessor", "lightning_identify", "lightning_install", "lightning_policy_fault"]

SUPPORTED = {"openai-agents": ("0.20", "1")}
"""Distribution -> (first version this works with, first that it does not)."""
RUN_TOOL = ("_invoke_function_tool_with_metadata", "invoke_function_tool")
"""The functions that run a tool; which of them the SDK calls depends on its version."""
_undo: list[Callable[[], None]] = []


POLICY_FAULTS = {"agents.MaxTurnsExceeded": "max_turns", "agents.ModelBehaviorError": "malformed_output"}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Stand before the SDK's trace provider from now on. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    receivers.append(emit)
    if not _undo:
        before, restore_exporter = get_trace_provider(), _silence_default_exporter()
        ours = cast("TraceProvider", Provider(before))
        set_trace_provider(ours)
        outcomes.start(current_step)
        # Around what counts a tool's timeout, so that waiting for a turn is not the tool's time.
        free_tools = hold_slots("agents.run_internal.tool_execution", "", RUN_TOOL, _tool_of)

        def restore() -> None:
            free_tools()
            outcomes.stop(current_step)
            restore_exporter()
            if get_trace_provider() is ours:  # else the user has set another one since
                set_trace_provider(before)

        _undo.append(restore)

    def undo() -> None:
        receivers.remove(emit)
        if not receivers:
            _undo.pop()()

    return undo


@lightning.hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
def lightning_identify() -> lightning.Caller | None:
    """The innermost agent, tool or guardrail that runs here, with the model call that is under way."""
    step = current_step()
    return step.caller() if step else None


def _tool_of(*, function_tool: Any, **_: object) -> str:
    return str(function_tool.name)


def _silence_default_exporter() -> Callable[[], None]:
    """It takes nothing in; what it had taken in before waits. Methods are shadowed in the SDK's one instance of each."""
    exporter, processor = cast("Any", default_exporter()), cast("Any", default_processor())
    waiting: list[object] = []
    exporter.export = waiting.extend
    processor.on_trace_start = processor.on_span_end = lambda _: None

    def restore() -> None:
        del exporter.export, processor.on_trace_start, processor.on_span_end
        for item in waiting:
            (processor.on_trace_start if isinstance(item, Trace) else processor.on_span_end)(item)

    return restore


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What the SDK's exceptions tell of the model."""
    if "not found in agent" in str(error) and by_type(error, POLICY_FAULTS) == "malformed_output":
        return "invented_tool"
    return by_type(error, POLICY_FAULTS)
