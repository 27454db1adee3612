"""What lets others than the agents of this process in: clients on other machines, runs of other projects, strangers' networks.

The invariant: a training on one machine asks nobody for it. A setting that needs it is refused by its name where no plugin
brings it, before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from lightning.addresses import is_loopback
from lightning.config import Config
from lightning.errors import ConfigError, DataError
from lightning.gateway import Gateway
from lightning.gateway.connections import guard_of
from lightning.plugins import plugins
from lightning.runner.protocol import Site
from lightning.store.protocol import ShowsProject, Store
from lightning.types import DEFAULT_PROJECT, Run


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a client needs to work for a run, and the command that starts one, for a person to type."""

    site: Site
    command: str


class ClientDoor(Protocol):
    """Answers clients on the port of one gateway, until it is closed, which is before the gateway is."""

    async def invite(self, run: Run, folder: Path) -> Invitation:
        """Let clients work for a run; files that they need are written into `folder`, which is the run's."""

    async def close(self) -> None:
        """Let everybody go who waits."""


class RunServer(Protocol):
    """What a plugin registers with `register_servers`. It keeps nothing between two calls."""

    def on_port(self, config: Config) -> Config:
        """The settings of a trainer, with the gateway on the port that clients know."""

    async def check_exposure(self, store: Store, host: str) -> None:
        """Raise `ConfigError` unless what serves this store may listen on `host`, which is beyond this machine."""

    def open(self, store: Store, gateway: Gateway, config: Config) -> ClientDoor:
        """Answer clients on a gateway that has not started. The store is that of all projects."""

    def check_project(self, project: str) -> None:
        """Raise `DataError` for what cannot name a project."""

    def of_project(self, store: Store, project: str) -> Store:
        """A store of all projects as one of them sees it, with its own names for resources."""


def run_server(wanted: str) -> RunServer:
    """The one that is registered. Raises `PluginError`, which says what `wanted` it, where there is none or several."""
    return cast("Callable[[], RunServer]", plugins().sole("servers", wanted))()


def check_server_settings(config: Config) -> None:
    """Raise `PluginError` for settings that open a port to others, or guard it, and cannot be met."""
    if config.server.port:
        run_server(f"server.port = {config.server.port}")
    for setting, host in (("gateway.host", config.gateway.host), ("server.host", config.server.host)):
        if not is_loopback(host):
            run_server(f"{setting} = {host!r}, beyond this machine,")
    guard_of(config.gateway.limits, "localhost")


async def check_exposure(store: Store, host: str) -> None:
    """Return when a gateway of this store may listen on `host`; raises `ConfigError` or `PluginError` otherwise."""
    if not is_loopback(host):
        await run_server(f"to listen on {host!r}, beyond this machine,").check_exposure(store, host)


def project_of(config: Config) -> str:
    """The setting `trainer.project`. Raises `ConfigError` for what cannot name one."""
    project = config.trainer.project
    if project != DEFAULT_PROJECT:
        server = run_server(f"trainer.project = {project!r}")
        try:
            server.check_project(project)
        except DataError as error:
            raise ConfigError(f"trainer.project: {error}") from error
    return project


def of_project(store: Store, project: str) -> Store:
    """A store as `project` sees it, where it shows names as they are stored or is such a view already. The default project's
    is the store itself: its names are stored as they are."""
    if project == DEFAULT_PROJECT or (isinstance(store, ShowsProject) and store.project is not None):
        return store
    return run_server(f"the project {project!r}").of_project(store, project)
