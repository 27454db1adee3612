"""The settings `runner.ray`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning.config import PluginSettings
from pydantic import Field, JsonValue


class RayConfig(PluginSettings):
    """Agents in actors of a Ray cluster."""

    place: ClassVar[str] = "runner.ray"

    address: str = ""
    """Ray cluster: `auto`, `HOST:6379` of its head, or `ray://HOST:10001`; empty starts one on this machine."""
    agents_per_actor: int = Field(default=1, ge=1)
    """Number of agents that run at once in one actor. They share its imports and resources; each has its own process."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for an actor."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for an actor."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that Ray reserves for an actor; 0 reserves none."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that an actor needs, by name. They select the nodes."""
    scheduling: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """Ray's placement: `DEFAULT` fills a node first, `SPREAD` uses all of them evenly."""
    runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """Ray's runtime environment of the actors (`working_dir`, `pip`, `env_vars`, ...), passed unchanged. It is stored
    with the run: put no secret in it."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Time limit in seconds until Ray has placed an actor and the actor has loaded the agent."""
