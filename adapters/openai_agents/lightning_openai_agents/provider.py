"""Stands before the SDK's trace provider and its spans, and keeps a `Step` beside each of them.

The invariant: the real provider makes every trace and span, with the arguments it would have got, and its processors see
them as ever. A span that is switched off stays so; the step beside it is lightning's alone.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from typing import Any, Self

from agents.tracing import Span, TraceProvider

from lightning_openai_agents.steps import Step

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
