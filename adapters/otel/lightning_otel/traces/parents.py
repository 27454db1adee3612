"""Makes the rollout the remote parent of every OpenTelemetry span that begins in it.

The invariant: OpenTelemetry is never imported here. Where the agent's program has it, instrumented requests carry the rollout's
`traceparent` to other services; when the rollout ends, the context is restored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from types import ModuleType

from lightning.instrument.context import root_span_id, trace_id_of
from lightning.plugins.importing import on_import
from lightning.runner.stages import AttemptStage
from lightning.types import LLM, Task

API = "opentelemetry.trace"

_wanted: ContextVar[_Parent | None] = ContextVar("lightning_otel_parent_wanted", default=None)
_attached: ContextVar[_Parent | None] = ContextVar("lightning_otel_parent", default=None)


class ParentsStage(AttemptStage):
    """The stage that makes spans of an agent's call children of its attempt."""

    api, after = 1, ("branches",)

    def around(self, task: Task, llm: LLM) -> AbstractContextManager[None] | None:
        """Return the context around the agent's call; None without a key, because the ids are made of it."""
        return parent_of_spans(llm.api_key) if llm.api_key else None


@contextmanager
def parent_of_spans(token: str) -> Iterator[None]:
    """Make spans that begin in the block children of the attempt with this token: now, or once OpenTelemetry's API is
    imported."""
    parent = _Parent(token)
    before = _wanted.set(parent)
    undo = on_import(API, parent.attach)
    try:
        yield
    finally:
        undo()
        parent.detach()
        _wanted.reset(before)


class _Parent:
    """The parent of one attempt's spans, attached to OpenTelemetry's context at most once."""

    def __init__(self, token: str) -> None:
        self._trace_id = trace_id_of(token)
        self._undo: object = None
        self._mark: Token[_Parent | None]

    def attach(self, api: ModuleType) -> None:
        if _wanted.get() is not self:
            return  # imported by another rollout, or in a thread of no rollout
        remote = api.SpanContext(
            int(self._trace_id, 16),
            int(root_span_id(self._trace_id), 16),
            is_remote=True,
            trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
        )
        self._undo = sys.modules["opentelemetry.context"].attach(api.set_span_in_context(api.NonRecordingSpan(remote)))
        self._mark = _attached.set(self)

    def detach(self) -> None:
        # Attached in a copy of this context (the API was imported by the agent's own task), it has ended with the copy.
        if _attached.get() is self:
            _attached.reset(self._mark)
            sys.modules["opentelemetry.context"].detach(self._undo)
