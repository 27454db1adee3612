"""The settings of Lightning Server, `server`, and of projects, `trainer.project`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import PluginSettings
from lightning.types import DEFAULT_PROJECT
from pydantic import Field


class ServerConfig(PluginSettings):
    """Lightning Server: the control API and the gateway on one port, for clients that run elsewhere."""

    place: ClassVar[str] = "server"
    host: str = "127.0.0.1"
    """Address to bind. A training binds it where `server.port` is set or clients run the agents."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    public_url: str = ""
    """URL at which clients reach this server, if it differs from the bound address (behind a proxy, in a container)."""


class ProjectConfig(PluginSettings):
    """The project of runs."""

    place: ClassVar[str] = "trainer"
    project: str = DEFAULT_PROJECT
    """Project of a run and of its prompts and weights. A server token is valid for one project; runners with a token of
    this project find the run. `lightning serve --store` makes its first runner token for this project."""
