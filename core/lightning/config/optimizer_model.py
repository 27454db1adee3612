"""The section of the model that writes prompts. Every field is documented here and nowhere else."""

from __future__ import annotations

from pydantic import Field

from lightning.config.section import Section
from lightning.errors import ConfigError


class OptimizerModelConfig(Section):
    """The model that criticises and edits prompts (APO), at an OpenAI-compatible endpoint. Without one, the policy does
    both."""

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
        """Raise `ConfigError` for an endpoint that cannot be meant, without a word of what may be a key."""
        if self == OptimizerModelConfig():
            return
        if not self.model or not self.base_url:
            raise ConfigError("the section optimizer_model needs both: a model, and the base_url of where it is")
        check_endpoint(self.base_url, self.api_key_env)


def check_endpoint(base_url: str, api_key_env: str) -> None:
    """Raise `ConfigError` for a URL or a variable's name that may hold a password or a key: settings are kept with the run."""
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url={base_url!r} of the optimiser model is no URL: write https://.../v1")
    if "@" in base_url.split("/", 3)[2] or "?" in base_url:
        raise ConfigError(
            "base_url of the optimiser model has a user, a password or a query in it, and settings are kept with the run: "
            "write https://.../v1 alone, with the key in the environment variable that api_key_env names"
        )
    if api_key_env and not api_key_env.isidentifier():
        raise ConfigError(
            "api_key_env of the optimiser model cannot name an environment variable: give the name of the variable that "
            "holds the key, not the key"
        )
