"""The dialects plugin: OpenAI's older text API and Responses API, and Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import GatewayConfig, PluginSettings
    from lightning.gateway.calls import Parts
    from lightning.gateway.dialects import Dialect
    from starlette.types import ASGIApp


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the setting `gateway.hosted_tools`."""
    register("hosted_tools", later("lightning_dialects.config:HostedToolsConfig"))


@hookimpl
def register_dialects(register: Callable[[str, Callable[[GatewayConfig], Dialect]], None]) -> None:
    """Register the dialects `completions`, `responses` and `messages`."""
    from lightning_dialects.completions import Completions

    register("completions", lambda _: Completions())
    register("responses", made_later("lightning_dialects.responses:Responses"))
    register("messages", made_later("lightning_dialects.messages:Messages"))


@hookimpl
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """Register the route `messages/count_tokens`."""
    register("messages/count_tokens", made_later("lightning_dialects.count_tokens:CountTokens"))
