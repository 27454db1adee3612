"""What AutoGen's spans say: `invoke_agent` and `execute_tool` of agents and tools, `process` of its runtimes' agents.

The invariant: only spans that are open are known here, so whoever has ended calls no model.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable

import lightning
from lightning.instrument import ask
from lightning.instrument import emit as report
from lightning_otel import attributes as names
from lightning_otel.processor import SpanReporter
from lightning_otel.spans import OpenSpans, key
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from lightning_autogen.direct import direct
from lightning_autogen.results import results

open_spans = OpenSpans("AutoGen's agents")


class AutoGenReporter(SpanReporter):
    """Reports the tool runs that spans of AutoGen's stand for."""

    spans = open_spans

    def report(self, span: ReadableSpan) -> None:
        """See `SpanReporter.report`."""
        attributes = span.attributes or {}
        if not _is_autogen(span) or attributes.get(names.OPERATION) != names.EXECUTE_TOOL:
            return
        failed = span.status.status_code is trace.StatusCode.ERROR
        # AutoGen marks the span of a tool that raises; that of a cancelled one only closes while the stack unwinds.
        cancelled = isinstance(sys.exception(), (asyncio.CancelledError, GeneratorExit))
        event = lightning.ToolEvent(
            name=str(attributes.get(names.TOOL_NAME, "")),
            status="error" if failed else "unknown" if cancelled else "ok",
            call_id=str(attributes.get(names.TOOL_CALL_ID, "")),
            error=span.status.description or "",
            caller=caller_of(span.parent),
        )
        if event.status == "ok":
            results.complete(event, self.emit)
        else:
            self.emit(event)


class LightningHandler(AutoGenReporter):
    """Names AutoGen's agents and reports their tools where the adapter is not installed or is disabled.

    Add it to a provider by hand: `provider.add_span_processor(LightningHandler())`. Beside the installed adapter it reports
    nothing twice. `emit` receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Callable[[lightning.ToolEvent], None] = report) -> None:
        super().__init__(emit)
        ask(caller_here)


def caller_here() -> lightning.Caller | None:
    """Who calls from this task."""
    return caller_of(trace.get_current_span().get_span_context())


def caller_of(context: trace.SpanContext | None) -> lightning.Caller | None:
    """Who calls from inside a span; None when the innermost agent around it is not AutoGen's, or there is none."""
    open_spans.check_sampled(context)
    agent, call, parent, path = "", "", "", list[str]()
    known = direct.get()
    while known is None or key(context) != known.around:
        span = open_spans.of(context)
        if context is None or span is None:
            known = None
            break
        kind, name = _named(span)
        if not kind and not path and not call:  # of whoever instruments the client: AutoGen has none for model calls
            call = trace.format_span_id(context.span_id)
        if kind == "agent" and not agent:
            if not _is_autogen(span):
                return None  # another framework's agent, inside a tool
            agent, parent = name, trace.format_span_id(context.span_id)
        if name and path[-1:] != [name]:
            path.append(name)
        context = span.parent
    if known is not None:  # an agent that was called without a span
        agent, parent = agent or known.path[-1], parent or known.span_id
        path += [name for name in reversed(known.path) if path[-1:] != [name]]
    return lightning.Caller(agent, tuple(reversed(path)), call, parent, "autogen") if agent else None


def _named(span: ReadableSpan) -> tuple[str, str]:
    """(`agent` or `tool`, its name) of a span; two empty strings for any other."""
    attributes = span.attributes or {}
    match attributes.get(names.OPERATION):
        case names.INVOKE_AGENT:
            return "agent", str(attributes.get(names.AGENT_NAME, ""))
        case names.EXECUTE_TOOL:
            return "tool", str(attributes.get(names.TOOL_NAME, ""))
    if attributes.get("messaging.operation") == "process" and _is_autogen(span):
        # `writer` of `writer_<team's uuid>.(<key>)-A`: an agent of a runtime, such as the one that picks a team's speaker
        destination = str(attributes.get("messaging.destination", ""))
        return "agent", re.sub(r"(_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\.\(.*\)-A$", "", destination)
    return "", ""


def _is_autogen(span: ReadableSpan) -> bool:
    scope = span.instrumentation_scope
    return scope is not None and scope.name.startswith("autogen")
