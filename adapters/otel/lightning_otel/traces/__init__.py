"""The plugin `otel-traces`: the gateway takes spans of other processes at `/v1/traces`, also where OpenTelemetry is absent.

The invariant: every process loads this, so that nothing is imported before a gateway asks for its routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.gateway.calls import Parts
    from starlette.types import ASGIApp


@hookimpl
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """`traces`."""
    from lightning_otel.traces.endpoint import TraceEndpoint

    register("traces", TraceEndpoint)
