"""The plugin `otel-traces`: the gateway receives spans of other processes at `/v1/traces`, and adds what they show to outcomes,
even where OpenTelemetry is not installed. An agent's own spans become children of its attempt.

The invariant: every process loads this module, so it imports nothing before a gateway or a runner asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import RunnerConfig
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.runner.stages import AttemptStage
    from lightning.store.operation import OperationGroup
    from starlette.types import ASGIApp

TRACES = "traces"


@hookimpl
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """Register the route `traces`."""
    from lightning_otel.traces.endpoint import TraceEndpoint

    register(TRACES, TraceEndpoint)


@hookimpl
def register_operations(register: Callable[[str, Callable[[], OperationGroup]], None]) -> None:
    """Register the store operations on `spans`."""
    from lightning_otel.traces.store import SPANS

    register(SPANS.name, lambda: SPANS)


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the stage `traces` of the gateway."""
    from lightning_otel.traces.stage import TracesStage

    register(TRACES, TracesStage)


@hookimpl
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """Register the stage `traces` around attempts."""
    from lightning_otel.traces.parents import ParentsStage

    register(TRACES, lambda config: ParentsStage())
