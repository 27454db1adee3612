"""The settings of the record plugin, in the section `gateway`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import PluginSettings, Section
from pydantic import Field


class ProviderConfig(Section):
    """A provider to which the gateway forwards calls that are not for the policy."""

    base_url: str = ""
    """URL of the provider's API with its version: `https://api.openai.com/v1`."""
    api_key_env: str = ""
    """The environment variable of the gateway's process that holds the provider's key; never the key itself. Empty sends
    none."""
    models: tuple[str, ...] = ()
    """Models that the provider answers instead of the policy, as names that may contain `*`."""
    routes: tuple[str, ...] = ("embeddings", "moderations", "images", "audio")
    """Routes that the provider answers, below the API's version, with all of their subpaths."""


class RecordConfig(PluginSettings):
    """What is kept of calls, and who answers those that are not for the policy."""

    place: ClassVar[str] = "gateway"
    record_requests: bool = True
    """Store the request and the reply of each call, without credentials, so that a rollout can be replayed. If false, the store
    has only the calls' token ids, not their texts."""
    providers: dict[str, ProviderConfig] = Field(default_factory=dict)
    """Providers that answer calls which are not for the policy (embeddings, a judge's model), by name. Each has `base_url`,
    `api_key_env` (the environment variable of the gateway's process that holds the key), `models` (names, with `*`) and
    `routes` (`embeddings`, `moderations`, `images` and `audio` unless you list others)."""
