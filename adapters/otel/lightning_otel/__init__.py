"""OpenTelemetry, in both directions: the adapter reads the spans of the agent's process, and the gateway takes those of others.

The invariant: each half is an entry point of its own, and neither imports the other one or, before it is needed, OpenTelemetry.
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
