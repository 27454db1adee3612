"""OpenTelemetry in both directions: the adapter reads the spans of the agent's process, and the gateway receives those of other
processes.

The invariant: each half has its own entry point, and neither imports the other one, nor OpenTelemetry before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_otel.processor import LightningProcessor

__all__ = ["LightningProcessor"]


def __getattr__(name: str) -> object:
    if name == "LightningProcessor":
        from lightning_otel.processor import LightningProcessor

        return LightningProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
