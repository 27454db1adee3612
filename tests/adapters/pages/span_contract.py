"""What the conformance kit needs for every framework that is read by its spans: the tool, and the user's own processor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import lightning_otel.spans
from lightning.testing import AdapterContract
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


def calculator(expression: str) -> str:
    """Evaluate a product."""
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Own(SpanProcessor):
    """The user's own processor."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_end(self, span: object) -> None:
        self.seen.append(span)


class SpanContract(AdapterContract):
    """The kit for `lightning_otel`."""

    adapter = "otel"

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        own = Own()
        if type(trace.get_tracer_provider()) is trace.ProxyTracerProvider:
            trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
        trace.get_tracer_provider().add_span_processor(own)
        yield own.seen
        own.seen = []  # it stays on the provider

    def leftovers(self) -> object:
        return len(lightning_otel.spans.open_spans)
