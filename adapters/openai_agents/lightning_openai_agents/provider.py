"""Stands before the SDK's trace provider and its spans, and keeps a `Step` beside each of them.

The invariant: the real provider makes every trace and span, with the arguments it would have got, and its processors see
them as ever. A span that is switched off stays so; the step beside it is lightning's alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Self, cast

from agents.tracing import Span, Trace, TraceProvider, get_trace_provider, set_trace_provider
from agents.tracing.processors import default_exporter, default_processor
from lightning.instrument import hold_slots

from lightning_openai_agents.outcomes import watching
from lightning_openai_agents.steps import Step

RUN_TOOL = ("_invoke_function_tool_with_metadata", "invoke_function_tool")
"""The functions that run a tool; which of them the SDK calls depends on its version."""
_current: ContextVar[WatchedSpan | None] = ContextVar("lightning_openai_agents_span", default=None)


def current_step() -> Step | None:
    """The step of the innermost span that this thread or task has begun."""
    watched = _current.get()
    return watched.step if watched else None


@Span.register
class WatchedSpan:
    """The real span, whose step begins and ends with it."""

    def __init__(self, span: Span[Any], around: WatchedSpan | None) -> None:
        self.span, self.failure = span, span.error
        self.step: Step = Step(span.span_data, around.step if around else None, span.span_id)
        self._token: Token[WatchedSpan | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.span, name)

    def __enter__(self) -> Self:
        self.start(mark_as_current=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self.span.__exit__(*raised)  # type: ignore[no-untyped-call]  # the SDK's
        self._end(True)

    def start(self, mark_as_current: bool = False) -> None:
        """As a span does."""
        self.span.start(mark_as_current)
        if mark_as_current:
            self._token = _current.set(self)

    def finish(self, reset_current: bool = False) -> None:
        """As a span does."""
        self.span.finish(reset_current)
        self._end(reset_current)

    def set_error(self, error: Any) -> None:
        """As a span does; one that is switched off would forget it."""
        self.failure = error
        self.span.set_error(error)

    def _end(self, reset_current: bool) -> None:
        self.step.close(self.failure)
        if reset_current and self._token is not None:
            token, self._token = self._token, None
            with contextlib.suppress(ValueError):  # begun in another task, which sees that the step is closed
                _current.reset(token)


@TraceProvider.register
class Provider:
    """The real provider, whose spans are watched."""

    def __init__(self, real: TraceProvider) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_current_span(self) -> Any:
        """The real one; watched, if it was made here."""
        real, watched = self._real.get_current_span(), _current.get()
        return watched if watched is not None and watched.span is real else real

    def create_span(self, span_data: Any, span_id: Any = None, parent: Any = None, disabled: bool = False) -> Any:
        """The real one, watched."""
        around, inner = (_current.get(), None) if parent is None else (None, parent)
        if isinstance(parent, WatchedSpan):
            around, inner = parent, parent.span
        return WatchedSpan(self._real.create_span(span_data, span_id, inner, disabled), around)


def attach() -> Callable[[], None]:
    """Stand before the SDK's trace provider from now on; returns the undo."""
    before, undos = get_trace_provider(), contextlib.ExitStack()
    ours = cast("TraceProvider", Provider(before))

    def restore_provider() -> None:
        if get_trace_provider() is ours:  # else the user has set another one since
            set_trace_provider(before)

    undos.callback(restore_provider)
    undos.callback(_silence_default_exporter())
    set_trace_provider(ours)
    undos.callback(watching.add(current_step))
    # Around what counts a tool's timeout, so that waiting for a turn is not the tool's time.
    undos.callback(hold_slots("agents.run_internal.tool_execution", "", RUN_TOOL, _tool_of))
    return undos.close


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
