"""The settings `optimizer_model`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import PluginSettings, check_endpoint
from lightning.errors import ConfigError
from pydantic import Field


class OptimizerModelConfig(PluginSettings):
    """The model that criticises and edits prompts (APO), at an OpenAI-compatible endpoint. Without one, the policy does
    both."""

    place: ClassVar[str] = "optimizer_model"

    model: str = ""
    """The model's name at the endpoint."""
    base_url: str = ""
    """The endpoint without `/chat/completions`: `https://api.openai.com/v1`. It receives tasks and transcripts."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; never the key itself. Empty sends none."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature; null sends none, for endpoints that reject one."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds to wait for an answer."""
    attempts: int = Field(default=4, ge=1)
    """Attempts per request after temporary failures, with growing pauses."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum of concurrent requests."""

    def check(self) -> None:
        """Raise `ConfigError` if the endpoint is incomplete or malformed. The message never repeats a text that may be a
        key."""
        if self == OptimizerModelConfig():
            return
        if not self.model or not self.base_url:
            raise ConfigError("the section optimizer_model needs both: a model, and the base_url of its endpoint")
        check_endpoint(self.base_url, self.api_key_env)
