"""Adapter for AutoGen: reads from AutoGen's own OpenTelemetry spans which agent is calling, and which tool ran.

The invariant: it only looks; only tools with a limit (`runner.tool_limits`) wait for a slot. Spans go where the user's
`TracerProvider` sends them, and nowhere without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import lightning
from lightning.instrument import FrameworkAdapter, Installations, hold_slots

try:
    from opentelemetry.sdk.trace import SpanProcessor  # AutoGen itself only brings the API
except ImportError as error:
    raise lightning.MissingExtraError("autogen", "opentelemetry.sdk") from error
from lightning.plugins.importing import on_import
from lightning_otel.tracer_provider import ProviderWatch

from lightning_autogen.handler import (
    AutoGenReporter,
    LightningHandler,
    caller_here,
    replaced,
    results,
    watch_agents,
)

__all__ = ["SUPPORTED", "LightningHandler", "adapter"]

SUPPORTED = {
    "autogen-core": ("0.7.2", "0.8"),
    "autogen-agentchat": ("0.7.2", "0.8"),
    "opentelemetry-sdk": ("1.34", "2"),
}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""


def _reporter() -> SpanProcessor:
    return AutoGenReporter(installations.tell)


_watch = ProviderWatch(_reporter)


def _attach() -> Callable[[], None]:
    undos = ExitStack()
    _watch.start()
    undos.callback(_watch.stop)
    results.start()
    undos.callback(results.stop)
    undos.callback(replaced.put_back)
    # If a program imports `autogen_agentchat.agents` first, that import has begun, and the one of the class's module has not.
    agents, tools = "autogen_agentchat.agents", "autogen_core.tools._base"
    for name in (agents, f"{agents}._base_chat_agent"):
        undos.callback(on_import(name, watch_agents))
    undos.callback(hold_slots(tools, "BaseTool", ("run_json",)))
    undos.callback(hold_slots(tools, "BaseStreamTool", ("run_json_stream",)))
    return undos.close


installations = Installations(_attach)

adapter = FrameworkAdapter(SUPPORTED, installations, caller_here)
"""The adapter. It names the innermost agent that runs here, if it is AutoGen's; its path has agents, tools and inner teams."""
