"""Lightning Server beside a trainer: the control API on the run's own gateway, projects, and who may listen beyond loopback."""

from __future__ import annotations

from lightning.config import Config
from lightning.gateway.gateway import Gateway
from lightning.store.protocol import Store
from lightning.types import Scope

from lightning_server.auth import check_exposure, check_project
from lightning_server.control import Control, on_server_port
from lightning_server.projects import ProjectStore


class LightningServer:
    """A `RunServer`, made of what `lightning serve` is made of."""

    def on_port(self, config: Config) -> Config:
        """See `RunServer.on_port`: the port of the section `server`."""
        return on_server_port(config)

    async def check_exposure(self, store: Store, host: str) -> None:
        """See `RunServer.check_exposure`: a token that a person made is needed."""
        await check_exposure(store, host)

    def open(self, store: Store, gateway: Gateway, config: Config) -> Control:
        """See `RunServer.open`."""
        return Control(store, gateway, config)

    def check_project(self, project: str) -> None:
        """See `RunServer.check_project`: a project is what a token can be bound to."""
        check_project(project, Scope.RUNNER)

    def of_project(self, store: Store, project: str) -> Store:
        """See `RunServer.of_project`."""
        return ProjectStore(store, project)
