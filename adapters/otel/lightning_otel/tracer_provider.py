"""Shows a span processor every span of the process, whichever code sets the `TracerProvider`, and whenever.

The invariant: the user's own provider, set before or after, gets the spans and keeps its resource, sampler and exporters.
OpenTelemetry accepts one provider only. While there is none, a stand-in takes its place: it records for our processor, exports
nothing, and gives way to the provider that `trace.set_tracer_provider` is called with.

Adapters of frameworks that report by spans import this module, which needs OpenTelemetry's API. The SDK is imported for the
first span.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from lightning.errors import LightningError
from opentelemetry import trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger(__name__)


def is_sdk_disabled() -> bool:
    """Whether the environment disables OpenTelemetry's SDK."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


class StandIn(trace.TracerProvider):
    """Passes everything on to the provider behind it: one of the SDK, made for the first span, until the user sets one.

    For code that checks by `isinstance` which provider is set, it looks like the one that would be there without it: first the
    `ProxyTracerProvider`, which means that nobody has set one, and then the user's.
    """

    def __init__(self, prepare: Callable[[trace.TracerProvider], None]) -> None:
        self._prepare, self._lock = prepare, threading.Lock()
        self._looks: type = trace.ProxyTracerProvider
        self.real: Any = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._looks

    def step_aside(self, users: trace.TracerProvider) -> None:
        """Send spans to the user's provider from now on, also those of tracers made before."""
        self.real, self._looks = users, type(users)

    def behind(self) -> Any:
        """Return the provider that starts spans now."""
        with self._lock:
            if self.real is None:
                from opentelemetry.sdk.trace import TracerProvider
                from opentelemetry.sdk.trace.sampling import ALWAYS_ON

                provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
                self._prepare(provider)
                self.real = provider
            return self.real

    def get_tracer(self, *scope: Any, **more: Any) -> trace.Tracer:
        """Return a tracer that looks up the provider for each span."""
        return _Tracer(lambda: self.behind().get_tracer(*scope, **more))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind(), name)


class _Tracer(trace.Tracer):
    def __init__(self, now: Callable[[], trace.Tracer]) -> None:
        self._now = now

    def start_span(self, *args: Any, **more: Any) -> trace.Span:
        return self._now().start_span(*args, **more)

    def start_as_current_span(self, *args: Any, **more: Any) -> Any:
        return self._now().start_as_current_span(*args, **more)


class ProviderWatch:
    """A processor on the process's provider that sees spans from `start` to `stop`."""

    def __init__(self, processor: Callable[[], SpanProcessor]) -> None:
        self._processor = processor
        self._watched: WeakSet[object] = WeakSet()
        self._stand_in: StandIn | None = None  # while it holds the place
        self._inner: Callable[[trace.TracerProvider], None] | None = None
        self._running = False

    def start(self) -> None:
        """Watch the provider that is set, and any that is set later. Raises `LightningError` where no span can be seen."""
        if is_sdk_disabled():
            raise LightningError("OTEL_SDK_DISABLED=true keeps OpenTelemetry from recording spans: unset it")
        provider = trace.get_tracer_provider()
        if type(provider) is trace.ProxyTracerProvider:  # nobody has set one
            self._stand_in = StandIn(self._add)
            trace.set_tracer_provider(self._stand_in)
        elif provider is not self._stand_in:
            self._add(provider)
        if self._inner is None:
            self._inner = trace.set_tracer_provider
            _rebind(self._inner, self._set)
        self._running = True

    def stop(self) -> None:
        """Restore `set_tracer_provider`: now, or once the stand-in, which OpenTelemetry does not release, has given way."""
        self._running = False
        if self._stand_in is None and self._inner is not None and trace.set_tracer_provider == self._set:
            _rebind(self._set, self._inner)
            self._inner = None

    def _set(self, tracer_provider: trace.TracerProvider) -> None:
        if tracer_provider is self._stand_in:
            return
        try:
            self._add(tracer_provider)
        except LightningError as error:
            logger.warning("%s", error)
        if self._stand_in is not None:
            self._stand_in.step_aside(tracer_provider)
            self._stand_in = None
            if not self._running:
                self.stop()
        elif self._inner is not None:
            self._inner(tracer_provider)

    def _add(self, provider: trace.TracerProvider) -> None:
        add = getattr(provider, "add_span_processor", None)
        if add is None:
            raise LightningError(
                f"agents go without names: the process's TracerProvider, a {type(provider).__qualname__}, takes no span "
                "processors; set one of opentelemetry.sdk.trace"
            )
        owner = getattr(add, "__self__", provider)  # for a stand-in, the provider behind it
        if owner not in self._watched:
            from lightning_otel.processor import Muting

            add(Muting(self._processor(), lambda: self._running))
            self._watched.add(owner)


def _rebind(old: object, new: object) -> None:
    """Replace `trace.set_tracer_provider`, also in modules that have imported it by name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("set_tracer_provider") == old:
            names["set_tracer_provider"] = new
