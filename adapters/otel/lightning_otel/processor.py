"""The span processors, and with them the SDK: imported once a provider is there to add one to."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import lightning
from lightning.instrument import ask, attached_adapters, current_caller
from lightning.instrument import emit as report
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from lightning_otel.spans import FRAMEWORK, OpenSpans, caller_here, open_spans, tool_run

Emit = Callable[[lightning.ToolEvent], None]


class SpanReporter(SpanProcessor):
    """Knows the `spans` of a framework while they are open, and gives what one stood for to `emit`."""

    spans: ClassVar[OpenSpans] = open_spans

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Know the span while it is open."""
        self.spans.opened(span)

    def on_end(self, span: ReadableSpan) -> None:
        """Report what it stood for."""
        if self.spans.closed(span):
            self.report(span)

    def report(self, span: ReadableSpan) -> None:
        """Report a tool run, unless the framework has an adapter of its own, which does so."""
        if (event := tool_run(span)) is not None and not _reports_itself(span):
            self.emit(event)


class Muting(SpanProcessor):
    """Hands spans on to a processor while it is not muted: a provider does not give one back."""

    def __init__(self, processor: SpanProcessor, runs: Callable[[], bool]) -> None:
        self._processor, self._runs = processor, runs

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See `SpanProcessor.on_start`."""
        if self._runs():
            self._processor.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor.on_end`."""
        if self._runs():
            self._processor.on_end(span)


class LightningProcessor(SpanReporter):
    """Names agents and reports tools where the adapter is not installed or is disabled.

    Add it to a provider by hand: `provider.add_span_processor(LightningProcessor())`. Beside the installed adapter it
    reports nothing twice. `emit` receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Emit = report) -> None:
        super().__init__(emit)
        ask(caller_here)


def _reports_itself(span: ReadableSpan) -> bool:
    """Whether the framework that a span tells of has an adapter that is attached. Its scope decides, whoever calls."""
    scope = _letters(span.instrumentation_scope.name) if span.instrumentation_scope else ""
    caller = current_caller()  # known by hand, where no adapter is attached
    known = {*attached_adapters(), *([caller.framework] if caller else [])} - {"", FRAMEWORK, "raw"}
    return any(_letters(name) in scope for name in known)


def _letters(name: str) -> str:
    """`openai_agents` and `openai-agents` alike."""
    return name.lower().replace("-", "").replace("_", "")
