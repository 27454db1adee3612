"""Adapter for AutoGen: reads from AutoGen's own OpenTelemetry spans which agent is calling, and which tool ran.

The invariant: it only looks, but for tools with a limit (`runner.tool_limits`), which wait for their turn. The spans go where
the user's `TracerProvider` sends them, and nowhere without one.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import check_supported, hold_slots

try:
    import opentelemetry.sdk.trace  # noqa: F401 — AutoGen itself only brings the API
except ImportError as error:
    raise lightning.MissingExtraError("autogen", "opentelemetry.sdk") from error
from lightning.plugins.importing import on_import
from lightning_otel.tracer_provider import ProviderWatch

from lightning_autogen.direct import DirectCalls
from lightning_autogen.handler import Installed, LightningHandler, caller_here, receivers
from lightning_autogen.results import results

__all__ = ["SUPPORTED", "LightningHandler", "lightning_identify", "lightning_install"]

SUPPORTED = {
    "autogen-core": ("0.7.2", "0.8"),
    "autogen-agentchat": ("0.7.2", "0.8"),
    "opentelemetry-sdk": ("1.34", "2"),
}
"""Distribution -> (first version this works with, first that it does not); what is not installed does not matter."""

_watch = ProviderWatch(Installed)
_direct = DirectCalls(lambda: caller.path if (caller := caller_here()) else ())


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Watch AutoGen's spans and events. Raises `PluginError` for versions out of range."""
    check_supported(SUPPORTED)
    _watch.start()
    results.start()
    receivers.append(emit)
    # A program may import `autogen_agentchat.agents` first: it has begun by now, and the module of its class has not.
    agents = "autogen_agentchat.agents"
    stop_waiting = [on_import(name, _direct.start) for name in (agents, f"{agents}._base_chat_agent")]
    tools = "autogen_core.tools._base"
    stop_waiting.append(hold_slots(tools, "BaseTool", ("run_json",)))
    stop_waiting.append(hold_slots(tools, "BaseStreamTool", ("run_json_stream",)))

    def undo() -> None:
        for stop in stop_waiting:
            stop()
        receivers.remove(emit)
        if not receivers:
            _direct.stop()
            results.stop()
            _watch.stop()

    return undo


@lightning.hookimpl(tryfirst=True)
def lightning_identify() -> lightning.Caller | None:
    """The innermost agent at work here, if it is AutoGen's. Its path has agents, tools and inner teams."""
    return caller_here()
