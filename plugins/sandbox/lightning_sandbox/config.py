"""The settings of sandboxes and of limits on tools, in the section `runner`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from lightning.config import PluginSettings
from pydantic import Field


class SandboxConfig(PluginSettings):
    """Sandboxes of agents' processes, and limits on their tools."""

    place: ClassVar[str] = "runner"
    sandbox: Literal["none", "bwrap"] = "none"
    """Sandbox of the agents' processes. With `bwrap` (Linux) each process has its own: it sees the system and the project
    read-only, no other process, no network but the gateway, and few environment variables."""
    sandbox_network: tuple[str, ...] = ()
    """Further hosts that agents in a sandbox may reach, each as `host:port` (`api.example.com:443`)."""
    sandbox_environment: tuple[str, ...] = ()
    """Further environment variables that agents in a sandbox get, as names that may contain `*`."""
    sandbox_files: tuple[str, ...] = ()
    """Further files and folders that agents in a sandbox may read."""
    tool_limits: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The most runs of a tool that are under way at once on a machine, by the tool's name. The other runs wait, and
    `runner.timeout` goes on meanwhile."""
