"""The settings of Lightning Server, `server`, of projects, `trainer.project`, of gateways in processes of their own,
`gateway.processes`, and of what guards a port, `gateway.limits`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import LimitsConfig, PluginSettings
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


class GatewayProcessesConfig(PluginSettings):
    """Gateways in processes of their own."""

    place: ClassVar[str] = "gateway"
    processes: int | None = Field(default=None, ge=0, le=64)
    """Number of processes beside the trainer's that answer the agents' calls; with 0 the trainer's own process does. null: one
    for each eight cores, at most four, where the trainer computes on a GPU and no port is set; else 0. They divide
    `gateway.limits.body_memory`."""


class ProjectConfig(PluginSettings):
    """The project of runs."""

    place: ClassVar[str] = "trainer"
    project: str = DEFAULT_PROJECT
    """Project of a run and of its prompts and weights. A server token is valid for one project; runners with a token of
    this project find the run. `lightning serve --store` makes its first runner token for this project."""


class PortLimits(PluginSettings, LimitsConfig):
    """Limits for one client of a port. Too many requests get status 429, too slow ones status 408."""

    place: ClassVar[str] = "gateway.limits"
    header_timeout: float = Field(default=20.0, gt=0)
    """Time limit in seconds from the start of a connection (or request) until the request's headers are complete."""
    body_timeout: float = Field(default=60.0, gt=0)
    """Time limit in seconds from the headers until the request's body is complete."""
    write_timeout: float = Field(default=120.0, gt=0)
    """Seconds that a client may leave sent data unread; then its connection is closed."""
    requests_per_second: float = Field(default=2000.0, ge=0)
    """Average rate of requests per token; bursts may be twice as large. 0 sets no limit."""
    concurrent_requests: int = Field(default=2048, ge=0)
    """Maximum of concurrent requests per token, long polls included. 0 sets no limit."""
    failures_per_minute: float = Field(default=120.0, ge=0)
    """Requests with wrong tokens per address and minute. Above the limit, only tokens that were accepted before are accepted. 0
    sets no limit."""
    connections: int = Field(default=8192, ge=0)
    """Maximum of open connections, and at most a third of the limit of open files. When it is reached, a new connection takes
    the place of the oldest one that waits for no answer, else it is closed. 0 sets no limit."""
    connections_per_address: int = Field(default=1024, ge=0)
    """Maximum of open connections from one address, loopback excepted. 0 sets no limit."""
