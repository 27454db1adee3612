"""Reads the caller from open spans, and tool runs from ended ones.

The invariant: only open spans are known here, so an ended agent makes no calls. The SDK is not imported.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

import lightning
from lightning.bounded import Once
from lightning.types import Json
from opentelemetry import trace

from lightning_otel import attributes as names

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan, Span

logger = logging.getLogger(__name__)

FRAMEWORK = "otel"


class OpenSpans:
    """The open spans of this process."""

    def __init__(self, agents: str = "agents") -> None:
        self.agents = agents
        """The agents that these spans name, in words for a message."""
        self._open: WeakValueDictionary[tuple[int, int], Span] = WeakValueDictionary()
        self._told = Once()

    def opened(self, span: Span) -> None:
        """Add an open span."""
        self._open[key(span.get_span_context())] = span

    def closed(self, span: ReadableSpan) -> bool:
        """Drop a span; return whether it was known."""
        return self._open.pop(key(span.get_span_context()), None) is not None

    def of(self, context: trace.SpanContext | None) -> Span | None:
        """Return the span of a context; None if it is not known."""
        return self._open.get(key(context)) if context is not None else None

    def check_sampled(self, context: trace.SpanContext | None) -> None:
        """Warn once if the sampler leaves out this trace, because its agents then have no names."""
        if context is not None and context.is_valid and not context.trace_flags.sampled and self._told.first():
            logger.warning(
                "%s go without names in traces that the TracerProvider's sampler leaves out: "
                "sample all of them while training (OTEL_TRACES_SAMPLER=always_on)",
                self.agents,
            )

    def __len__(self) -> int:
        return len(self._open)


def key(context: trace.SpanContext | None) -> tuple[int, int]:
    """Return the trace id and the span id of a context."""
    return (context.trace_id, context.span_id) if context else (0, 0)


open_spans = OpenSpans()


def caller_here() -> lightning.Caller | None:
    """Return the caller in this thread or task."""
    return caller_of(trace.get_current_span().get_span_context())


def caller_of(context: trace.SpanContext | None) -> lightning.Caller | None:
    """Return the caller of calls inside a span: the innermost agent around it, or None. Its span id is that of the model call's
    span."""
    open_spans.check_sampled(context)
    agent = span_id = parent_id = spoken_for = ""
    path: list[str] = []
    while context is not None and (span := open_spans.of(context)) is not None:
        operation, name = _operation(span), ""
        if operation in names.AGENT_OPERATIONS:
            name = _text(span, names.AGENT_NAME)
            if name and not agent:
                agent, parent_id = name, trace.format_span_id(context.span_id)
        elif operation == names.EXECUTE_TOOL:
            name = _tool(span)
        elif operation in names.MODEL_OPERATIONS and not path and not span_id:
            span_id, spoken_for = trace.format_span_id(context.span_id), _text(span, names.AGENT_NAME)
        if name and path[-1:] != [name]:
            path.append(name)
        context = span.parent
    if not agent and spoken_for:  # a framework whose agents have no spans, but names on those of their model calls
        agent = spoken_for
        path.insert(0, agent)
    return lightning.Caller(agent, tuple(reversed(path)), span_id, parent_id, FRAMEWORK) if agent else None


def tool_run(span: ReadableSpan) -> lightning.ToolEvent | None:
    """Return the tool run of an ended span; None for other spans."""
    name, call_id = _tool(span) or span.name, _text(span, names.TOOL_CALL_ID)
    if _operation(span) != names.EXECUTE_TOOL or name == names.MERGED_TOOLS:
        return None
    failed = span.status.status_code is trace.StatusCode.ERROR
    # A tool that raises has its span marked; that of a cancelled one only closes while the stack unwinds.
    cancelled = not failed and isinstance(sys.exception(), (asyncio.CancelledError, GeneratorExit))
    return lightning.ToolEvent(
        name=name,
        status="error" if failed else "unknown" if cancelled else "ok",
        call_id="" if call_id == names.NO_CALL_ID else call_id,
        arguments=_arguments(_text(span, names.TOOL_ARGUMENTS)),
        output=_text(span, names.TOOL_RESULT),
        error=_error(span) if failed else "",
        caller=caller_of(span.parent),
    )


_RUNS = f"{names.EXECUTE_TOOL} "


def _operation(span: ReadableSpan) -> str:
    """Return a span's operation. Google ADK adds attributes only at the end; until then the span's name shows it: `execute_tool
    search`."""
    return _text(span, names.OPERATION) or (names.EXECUTE_TOOL if span.name.startswith(_RUNS) else "")


def _tool(span: ReadableSpan) -> str:
    return _text(span, names.TOOL_NAME) or (span.name.removeprefix(_RUNS) if span.name.startswith(_RUNS) else "")


def _error(span: ReadableSpan) -> str:
    """Return the error of a failed span. If its status is only one word (`TOOL_ERROR`), the exception or the tool's output is
    added."""
    said = span.status.description or ""
    if said and _KIND.fullmatch(said) is None:
        return said
    more = next((_exception(event) for event in span.events if event.name == names.EXCEPTION_EVENT), "")
    more = more or _text(span, names.TOOL_RESULT)
    if not more:
        return said or "error"
    return more if said in more else f"{said}: {more}"


_KIND = re.compile(r"[\w.]+")


def _exception(event: Event) -> str:
    found = event.attributes or {}
    return f"{found.get(names.EXCEPTION_TYPE, '')}: {found.get(names.EXCEPTION_MESSAGE, '')}"


def _arguments(text: str) -> Json:
    try:
        return cast("Json", json.loads(text)) if text else None
    except ValueError:
        return text


def _text(span: ReadableSpan, name: str) -> str:
    return str((span.attributes or {}).get(name) or "")
