"""The span processors, which need the SDK: this module is imported when there is a provider to add one to."""

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
    """Keeps the open `spans` of a framework, and gives the tool runs of ended ones to `emit`."""

    spans: ClassVar[OpenSpans] = open_spans

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Add an open span."""
        self.spans.opened(span)

    def on_end(self, span: ReadableSpan) -> None:
        """Drop an ended span, and report what it was."""
        if self.spans.closed(span):
            self.report(span)

    def report(self, span: ReadableSpan) -> None:
        """Report a tool run, unless the framework has its own installed adapter, which reports it."""
        if (event := tool_run(span)) is not None and not _reports_itself(span):
            self.emit(event)


class Muting(SpanProcessor):
    """Passes spans on to a processor while `runs()` is true, because a provider cannot remove a processor."""

    def __init__(self, processor: SpanProcessor, runs: Callable[[], bool]) -> None:
        self._processor, self._runs = processor, runs

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Pass on a started span."""
        if self._runs():
            self._processor.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass on an ended span."""
        if self._runs():
            self._processor.on_end(span)


class LightningProcessor(SpanReporter):
    """Names agents and reports tools where the adapter is not installed or is disabled.

    Add it to a provider: `provider.add_span_processor(LightningProcessor())`. Beside the installed adapter it reports nothing
    twice. `emit` receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Emit = report) -> None:
        super().__init__(emit)
        ask(caller_here)


def _reports_itself(span: ReadableSpan) -> bool:
    """Whether the framework of a span has an attached adapter of its own. The span's instrumentation scope decides."""
    scope = _letters(span.instrumentation_scope.name) if span.instrumentation_scope else ""
    caller = current_caller()  # known by hand, where no adapter is attached
    known = {*attached_adapters(), *([caller.framework] if caller else [])} - {"", FRAMEWORK, "raw"}
    return any(_letters(name) in scope for name in known)


def _letters(name: str) -> str:
    """Return a name in one spelling: `openai_agents` and `openai-agents` are equal."""
    return name.lower().replace("-", "").replace("_", "")
