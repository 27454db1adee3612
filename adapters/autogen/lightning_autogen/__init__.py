"""Adapter for AutoGen: reads from AutoGen's own OpenTelemetry spans which agent is calling, and which tool ran.

The invariant: it only looks. The spans go where the user's `TracerProvider` sends them, and nowhere without one.
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
from lightning.instrument import check_supported
from lightning.instrument import emit as report
from opentelemetry import trace
from opentelemetry.context import Context

try:
    from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
except ImportError as error:
    raise lightning.MissingExtraError("autogen", "opentelemetry.sdk") from error
from lightning_autogen.provider import Watch

__all__ = ["SUPPORTED", "LightningHandler", "lightning_identify", "lightning_install"]

SUPPORTED = {
    "autogen-core": ("0.7.2", "0.8"),
    "autogen-agentchat": ("0.7.2", "0.8"),
    "opentelemetry-sdk": ("1.34", "2"),
}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""

logger = logging.getLogger(__name__)
Emit = Callable[[lightning.ToolEvent], None]

_live: WeakValueDictionary[tuple[int, int], Span] = WeakValueDictionary()
_emits: list[Emit] = []


class LightningHandler(SpanProcessor):
    """Names AutoGen's agents and reports their tools, from the spans of a provider that it is added to by hand.

    `provider.add_span_processor(LightningHandler())`; beside an installed adapter it reports nothing twice. `emit`
    receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Emit = report) -> None:
        self._emit = emit

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Remember the span while it is open."""
        _live[_key(span.get_span_context())] = span

    def on_end(self, span: ReadableSpan) -> None:
        """Report the tool run that a span of AutoGen's stands for."""
        open_span = _live.pop(_key(span.get_span_context()), None)
        attributes = span.attributes or {}
        if open_span is None or not _is_autogen(span) or attributes.get("gen_ai.operation.name") != "execute_tool":
            return
        failed = span.status.status_code is trace.StatusCode.ERROR
        # AutoGen marks a tool that raises; one that is cancelled only unwinds, and that is what is going on now.
        cancelled = isinstance(sys.exception(), (asyncio.CancelledError, GeneratorExit))
        event = lightning.ToolEvent(
            name=str(attributes.get("gen_ai.tool.name", "")),
            status="error" if failed else "unknown" if cancelled else "ok",
            call_id=str(attributes.get("gen_ai.tool.call.id", "")),
            error=span.status.description or "",
            caller=_caller(span.parent),
        )
        self._emit(event)


class _Installed(LightningHandler):
    """What `lightning_install` adds: silent while nothing is installed."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if _emits:
            super().on_start(span, parent_context)


def _emit(event: lightning.ToolEvent) -> None:
    if _emits:
        _emits[-1](event)  # the newest installation: a run is reported once


_watch = Watch(lambda: _Installed(_emit))


@lightning.hookimpl
def lightning_install(emit: Emit) -> Callable[[], None]:
    """Watch AutoGen's spans. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    _watch.start()
    _emits.append(emit)

    def undo() -> None:
        _emits.remove(emit)
        if not _emits:
            _watch.stop()

    return undo


@lightning.hookimpl(tryfirst=True)
def lightning_identify() -> lightning.Caller | None:
    """The innermost agent whose span is open here, if it is AutoGen's. The path has agents, tools and inner teams."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid and not context.trace_flags.sampled:
        _warn_of_sampling()
    return _caller(context)


def _caller(context: trace.SpanContext | None) -> lightning.Caller | None:
    agent, parent, names = "", "", list[str]()
    while context is not None and (span := _live.get(_key(context))) is not None:
        attributes = span.attributes or {}
        name, operation = "", attributes.get("gen_ai.operation.name")
        if operation == "execute_tool":
            name = str(attributes.get("gen_ai.tool.name", ""))
        elif operation == "invoke_agent":
            name = str(attributes.get("gen_ai.agent.name", ""))
        elif attributes.get("messaging.operation") == "process" and _is_autogen(span):
            name = _recipient(str(attributes.get("messaging.destination", "")))
        if name and not agent and operation != "execute_tool":
            if not _is_autogen(span):
                return None  # another framework's agent, inside a tool
            agent, parent = name, trace.format_span_id(span.get_span_context().span_id)
        if name and names[-1:] != [name]:
            names.append(name)
        context = span.parent
    return lightning.Caller(agent, tuple(reversed(names)), "", parent, "autogen") if agent else None


def _key(context: trace.SpanContext | None) -> tuple[int, int]:
    return (context.trace_id, context.span_id) if context else (0, 0)


def _is_autogen(span: ReadableSpan) -> bool:
    scope = span.instrumentation_scope
    return scope is not None and scope.name.startswith("autogen")


def _recipient(destination: str) -> str:
    """`writer` of `writer_<team's uuid>.(<key>)-A`: a runtime's agent, such as the one that selects a team's speaker."""
    return re.sub(r"(_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\.\(.*\)-A$", "", destination)


@functools.cache
def _warn_of_sampling() -> None:
    logger.warning(
        "AutoGen's agents go without names in traces that the TracerProvider's sampler leaves out: "
        "sample all of them while training (OTEL_TRACES_SAMPLER=always_on)"
    )
