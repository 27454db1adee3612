"""Shows a span processor every span of the process, whoever sets the `TracerProvider` and whenever.

The invariant: the user's own provider, set before or after, gets the spans and keeps its resource, sampler and exporters.
OpenTelemetry takes one provider for good. While there is none, a stand-in holds the place: it records for our processor,
exports nothing, and steps aside for the provider that `trace.set_tracer_provider` is given.

Adapters of what reports by its spans import this module, which needs OpenTelemetry's API. The SDK is imported for the first
span.
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
    """Whether the environment keeps OpenTelemetry's SDK from recording spans."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


class StandIn(trace.TracerProvider):
    """Passes everything on to the provider behind it: the SDK's, made for the first span, until there is the user's.

    To code that looks what has been set, by `isinstance`, it is what would be there without it: the `ProxyTracerProvider`
    that says nobody has set one, and then the user's.
    """

    def __init__(self, prepare: Callable[[trace.TracerProvider], None]) -> None:
        self._prepare, self._lock = prepare, threading.Lock()
        self._looks: type = trace.ProxyTracerProvider
        self.real: Any = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._looks

    def step_aside(self, users: trace.TracerProvider) -> None:
        """The user has set a provider: spans go there from now on, also those of tracers that were made before."""
        self.real, self._looks = users, type(users)

    def behind(self) -> Any:
        """The provider that starts the spans now."""
        with self._lock:
            if self.real is None:
                from opentelemetry.sdk.trace import TracerProvider
                from opentelemetry.sdk.trace.sampling import ALWAYS_ON

                provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
                self._prepare(provider)
                self.real = provider
            return self.real

    def get_tracer(self, *scope: Any, **more: Any) -> trace.Tracer:
        """A tracer that asks for the provider anew for each span."""
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
    """One processor on the process's provider, which hears of spans from `start` to `stop`."""

    def __init__(self, processor: Callable[[], SpanProcessor]) -> None:
        self._processor = processor
        self._watched: WeakSet[object] = WeakSet()
        self._stand_in: StandIn | None = None  # while it holds the place
        self._inner: Callable[[trace.TracerProvider], None] | None = None
        self._running = False

    def start(self) -> None:
        """Watch the provider that is set, and the one that will be. Raises `LightningError` where no span can be seen."""
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
        """Give `set_tracer_provider` back: now, or once the stand-in, whose place cannot be given back, has stepped aside."""
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
        owner = getattr(add, "__self__", provider)  # behind a stand-in, the provider that stands there now
        if owner not in self._watched:
            from lightning_otel.processor import Muting

            add(Muting(self._processor(), lambda: self._running))
            self._watched.add(owner)


def _rebind(old: object, new: object) -> None:
    """Put one function in the place of `trace.set_tracer_provider`, also where it has been imported by its name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("set_tracer_provider") == old:
            names["set_tracer_provider"] = new
