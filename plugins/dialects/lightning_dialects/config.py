"""The setting `gateway.hosted_tools`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning.config import PluginSettings


class HostedToolsConfig(PluginSettings):
    """How requests of the Responses and Messages APIs are treated."""

    place: ClassVar[str] = "gateway"
    hosted_tools: Literal["refuse", "drop"] = "refuse"
    """How to treat a request with tools that run on a provider's servers (web search, code interpreter): `refuse` it with the
    reason, or `drop` the tools, so that the model answers without them."""
