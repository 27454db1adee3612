"""The section of the model that writes prompts. Every field is documented here and nowhere else."""

from __future__ import annotations

from pydantic import Field

from lightning.config.section import Section


class OptimizerModelConfig(Section):
    """The model that criticises and edits prompts (APO), at an OpenAI-compatible endpoint. Without one the policy writes."""

    model: str = ""
    """Its name at the endpoint."""
    base_url: str = ""
    """The endpoint, as it is before `/chat/completions`: `https://api.openai.com/v1`. It is shown tasks and transcripts."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; never the key itself. Empty sends none."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature; null sends none, for endpoints that refuse one."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds to wait for an answer."""
    attempts: int = Field(default=4, ge=1)
    """How often a question is asked that fails in a way that may pass, with growing pauses."""
    concurrency: int = Field(default=8, ge=1)
    """Questions asked at once."""
