"""What AutoGen's spans say: `invoke_agent` and `execute_tool` of agents and tools, `process` of its runtimes' agents.

The invariant: only spans that are open are known here, so whoever has ended calls no model.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import sys
from collections.abc import Callable
from weakref import WeakValueDictionary

import lightning
from lightning.instrument import ask
from lightning.instrument import emit as report
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from lightning_autogen.direct import direct
from lightning_autogen.results import results

logger = logging.getLogger(__name__)

receivers: list[Callable[[lightning.ToolEvent], None]] = []
"""Of the installations, oldest first; the newest hears of the tools, so that each run is reported once."""
_open: WeakValueDictionary[tuple[int, int], Span] = WeakValueDictionary()


class LightningHandler(SpanProcessor):
    """Names AutoGen's agents and reports their tools where the adapter is not installed or is disabled.

    Add it to a provider by hand: `provider.add_span_processor(LightningHandler())`. Beside the installed adapter it reports
    nothing twice. `emit` receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Callable[[lightning.ToolEvent], None] = report) -> None:
        self._emit = emit
        ask(caller_here)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Know the span while it is open."""
        _open[_key(span.get_span_context())] = span

    def on_end(self, span: ReadableSpan) -> None:
        """Report the tool run that a span of AutoGen's stands for."""
        known = _open.pop(_key(span.get_span_context()), None)
        attributes = span.attributes or {}
        if known is None or not _is_autogen(span) or attributes.get("gen_ai.operation.name") != "execute_tool":
            return
        failed = span.status.status_code is trace.StatusCode.ERROR
        # AutoGen marks the span of a tool that raises; that of a cancelled one only closes while the stack unwinds.
        cancelled = isinstance(sys.exception(), (asyncio.CancelledError, GeneratorExit))
        event = lightning.ToolEvent(
            name=str(attributes.get("gen_ai.tool.name", "")),
            status="error" if failed else "unknown" if cancelled else "ok",
            call_id=str(attributes.get("gen_ai.tool.call.id", "")),
            error=span.status.description or "",
            caller=caller_of(span.parent),
        )
        if event.status == "ok":
            results.complete(event, self._emit)
        else:
            self._emit(event)


class Installed(LightningHandler):
    """What `lightning_install` adds to providers: silent while nothing is installed, since it cannot be removed."""

    def __init__(self) -> None:
        self._emit = _to_newest

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Know the span while it is open."""
        if receivers:
            super().on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Report the tool run that a span of AutoGen's stands for."""
        if receivers:
            super().on_end(span)


def _to_newest(event: lightning.ToolEvent) -> None:
    if receivers:
        receivers[-1](event)


def caller_here() -> lightning.Caller | None:
    """Who calls from this task."""
    return caller_of(trace.get_current_span().get_span_context())


def caller_of(context: trace.SpanContext | None) -> lightning.Caller | None:
    """Who calls from inside a span; None when the innermost agent around it is not AutoGen's, or there is none."""
    if context is not None and context.is_valid and not context.trace_flags.sampled:
        _warn_of_sampling()
    agent, call, parent, names = "", "", "", list[str]()
    known = direct.get()
    while known is None or _key(context) != known.around:
        span = _open.get(_key(context)) if context is not None else None
        if context is None or span is None:
            known = None
            break
        kind, name = _named(span)
        if not kind and not names and not call:  # of whoever instruments the client: AutoGen has none for model calls
            call = trace.format_span_id(context.span_id)
        if kind == "agent" and not agent:
            if not _is_autogen(span):
                return None  # another framework's agent, inside a tool
            agent, parent = name, trace.format_span_id(context.span_id)
        if name and names[-1:] != [name]:
            names.append(name)
        context = span.parent
    if known is not None:  # an agent that was called without a span
        agent, parent = agent or known.path[-1], parent or known.span_id
        names += [name for name in reversed(known.path) if names[-1:] != [name]]
    return lightning.Caller(agent, tuple(reversed(names)), call, parent, "autogen") if agent else None


def _named(span: ReadableSpan) -> tuple[str, str]:
    """(`agent` or `tool`, its name) of a span; two empty strings for any other."""
    attributes = span.attributes or {}
    match attributes.get("gen_ai.operation.name"):
        case "invoke_agent":
            return "agent", str(attributes.get("gen_ai.agent.name", ""))
        case "execute_tool":
            return "tool", str(attributes.get("gen_ai.tool.name", ""))
    if attributes.get("messaging.operation") == "process" and _is_autogen(span):
        # `writer` of `writer_<team's uuid>.(<key>)-A`: an agent of a runtime, such as the one that picks a team's speaker
        destination = str(attributes.get("messaging.destination", ""))
        return "agent", re.sub(r"(_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\.\(.*\)-A$", "", destination)
    return "", ""


def _key(context: trace.SpanContext | None) -> tuple[int, int]:
    return (context.trace_id, context.span_id) if context else (0, 0)


def _is_autogen(span: ReadableSpan) -> bool:
    scope = span.instrumentation_scope
    return scope is not None and scope.name.startswith("autogen")


@functools.cache
def _warn_of_sampling() -> None:
    logger.warning(
        "AutoGen's agents go without names in traces that the TracerProvider's sampler leaves out: "
        "sample all of them while training (OTEL_TRACES_SAMPLER=always_on)"
    )
