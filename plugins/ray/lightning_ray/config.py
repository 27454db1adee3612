"""The settings `runner.ray` and `policy_server.ray`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning.config import PluginSettings
from pydantic import Field, JsonValue


class ActorSettings(PluginSettings):
    """A Ray cluster, and what each actor there needs."""

    address: str = ""
    """Ray cluster: `auto`, `HOST:6379` of its head, or `ray://HOST:10001`; empty starts one on this machine."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for an actor."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that Ray reserves for an actor; 0 reserves none."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that an actor needs, by name. They select the nodes."""
    scheduling: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """Ray's placement: `DEFAULT` fills a node first, `SPREAD` uses all of them evenly."""


class RayConfig(ActorSettings):
    """Agents in actors of a Ray cluster."""

    place: ClassVar[str] = "runner.ray"

    agents_per_actor: int = Field(default=1, ge=1)
    """Number of agents that run at once in one actor. They share its imports and resources; each has its own process."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for an actor."""
    runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """Ray's runtime environment of the actors (`working_dir`, `pip`, `env_vars`, ...), passed unchanged. It is stored
    with the run: put no secret in it."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Time limit in seconds until Ray has placed an actor and the actor has loaded the agent."""


class RayServersConfig(ActorSettings):
    """vLLMs on nodes of a Ray cluster (`policy_server.placement = "ray"`), one in each actor."""

    place: ClassVar[str] = "policy_server.ray"

    start_timeout: float = Field(default=600.0, gt=0)
    """Time limit in seconds until Ray has found room for a vLLM, also for one that starts again."""
