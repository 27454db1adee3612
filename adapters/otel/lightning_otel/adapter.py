"""Adapter for every framework that emits OpenTelemetry's `gen_ai` spans: PydanticAI, Microsoft Agent Framework, and more.

The invariant: it only looks. Spans go where the user's `TracerProvider` sends them, and nowhere without one. A process that
starts no span does not import the SDK.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import lightning
from lightning.installation import install_command
from lightning.instrument import Installations, by_type, check_supported

from lightning_otel.spans import caller_here
from lightning_otel.tracer_provider import ProviderWatch, is_sdk_disabled

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger(__name__)

SUPPORTED = {"opentelemetry-api": ("1.34", "2"), "opentelemetry-sdk": ("1.34", "2")}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""


def _reporter() -> SpanProcessor:
    from lightning_otel.processor import SpanReporter

    return SpanReporter(installations.tell)


_watch = ProviderWatch(_reporter)


def _attach() -> Callable[[], None]:
    _watch.start()
    return _watch.stop


installations = Installations(_attach)

POLICY_FAULTS = {
    "pydantic_ai.UsageLimitExceeded": "max_turns",
    "pydantic_ai.IncompleteToolCall": "cut_off",
    "pydantic_ai.OutputTokenLimitExceeded": "cut_off",
    "pydantic_ai.UnexpectedModelBehavior": "malformed_output",
}
"""Exceptions that mean a fault of the model, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Watch the process's spans; returns the undo. Raises `PluginError` for unsupported versions.

    Where the SDK is not installed or is disabled there are no spans, and nothing is done.
    """
    if importlib.util.find_spec("opentelemetry.sdk") is None or is_sdk_disabled():
        logger.info(
            "no spans name agents: OpenTelemetry's SDK is disabled or not installed (%s)", install_command("otel")
        )
        return lambda: None
    check_supported(SUPPORTED)
    return installations.add(emit)


@lightning.hookimpl
def lightning_identify() -> lightning.Caller | None:
    """Name the innermost agent whose span is open here; None without one."""
    return caller_here()


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """Name the model's fault that an exception of PydanticAI means; None for others."""
    return by_type(error, POLICY_FAULTS)
