"""The span processors, and with them the SDK: imported once a provider is there to add one to."""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import ask, attached_adapters, current_caller
from lightning.instrument import emit as report
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from lightning_otel.spans import FRAMEWORK, caller_here, closed, opened, receivers, tool_run


class LightningProcessor(SpanProcessor):
    """Names agents and reports tools where the adapter is not installed or is disabled.

    Add it to a provider by hand: `provider.add_span_processor(LightningProcessor())`. Beside the installed adapter it
    reports nothing twice. `emit` receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Callable[[lightning.ToolEvent], None] = report) -> None:
        self._emit = emit
        ask(caller_here)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Know the span while it is open."""
        opened(span)

    def on_end(self, span: ReadableSpan) -> None:
        """Report a tool run, unless the framework has an adapter of its own, which does so."""
        if closed(span) and (event := tool_run(span)) is not None and not _reports_itself(span):
            self._emit(event)


class Installed(LightningProcessor):
    """What `lightning_install` adds to providers: silent while nothing is installed, since it cannot be removed."""

    def __init__(self) -> None:
        self._emit = _to_newest

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Know the span while it is open."""
        if receivers:
            super().on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Report a tool run, unless the framework has an adapter of its own, which does so."""
        if receivers:
            super().on_end(span)


def _reports_itself(span: ReadableSpan) -> bool:
    """Whether the framework that a span tells of has an adapter that is attached. Its scope decides, whoever calls."""
    scope = _letters(span.instrumentation_scope.name) if span.instrumentation_scope else ""
    caller = current_caller()  # known by hand, where no adapter is attached
    known = {*attached_adapters(), *([caller.framework] if caller else [])} - {"", FRAMEWORK, "raw"}
    return any(_letters(name) in scope for name in known)


def _letters(name: str) -> str:
    """`openai_agents` and `openai-agents` alike."""
    return name.lower().replace("-", "").replace("_", "")


def _to_newest(event: lightning.ToolEvent) -> None:
    if receivers:
        receivers[-1](event)
