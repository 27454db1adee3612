"""The plugin `server`: Lightning Servers and clients, stores over HTTP, and the commands for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, hookspec, later, made_later

if TYPE_CHECKING:
    import typer
    from lightning.config import Config, PluginSettings
    from lightning.gateway.connections import PortGuard
    from lightning.gateway.policy import Fleet
    from lightning.runner.protocol import Agent, Runner
    from lightning.store.operation import OperationGroup
    from lightning.store.protocol import Store
    from lightning.trainer.agents import RunServer

    from lightning_server.protocol import Host, WebApp

COMMANDS = {
    "runner": ("runner_command:runner", "Run an agent for Lightning Servers, on any machine."),
    "serve": ("serve_command:serve", "Serve a model through the gateway and record every call."),
    "token": ("token_command:app", "Make, list and revoke the tokens of a server's control API."),
    "pull": ("pull_command:pull", "Copy a version of weights into a folder, from this machine or a server."),
}
"""Commands by name: the module and object in this package, and the line in `lightning --help`."""


@hookspec
def register_web_apps(register: Callable[[str, Callable[[Host], WebApp]], None]) -> None:
    """Register web applications on the port of `lightning serve`. `register("pages", make)` makes one answer all paths below
    `/pages`.

    `make(host)` is called before the port opens and should return quickly. It returns a `WebApp`: an ASGI application with a
    `close`. The application itself checks who may see its pages, by `host.authenticator`.
    """


@hookimpl
def register_servers(register: Callable[[str, Callable[[], RunServer]], None]) -> None:
    """Register `lightning`, the server that a trainer opens for clients."""
    register("lightning", made_later("lightning_server.control:LightningServer"))


@hookimpl
def register_fleets(register: Callable[[str, Callable[[], Fleet]], None]) -> None:
    """Register `store`, the fleet whose gateways and trainers talk to each other through the store."""
    register("store", made_later("lightning_server.fleet.member:ServerFleet"))


@hookimpl
def register_ports(register: Callable[[str, PortGuard], None]) -> None:
    """Register `server`, which guards a gateway's port: request shares, timeouts and limits on connections."""
    register("server", made_later("lightning_server.port:guarded"))


@hookimpl
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """Register `remote`, the runner whose agents run in clients elsewhere."""
    register("remote", made_later("lightning_server.remote_runner:remote_runner"))


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """Register the store over HTTP for URLs of `http` and `https`."""
    register("http", made_later("lightning_server.http_store:HttpStore"))
    register("https", made_later("lightning_server.http_store:HttpStore"))


@hookimpl
def register_operations(register: Callable[[str, Callable[[], OperationGroup]], None]) -> None:
    """Register the store operations on `tokens`."""
    register("tokens", later("lightning_server.tokens:TOKENS"))


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `server`, `trainer.project`, `gateway.processes`, and further keys of `gateway.limits`."""
    register("processes", later("lightning_server.config:GatewayProcessesConfig"))
    register("limits", later("lightning_server.config:PortLimits"))
    register("server", later("lightning_server.config:ServerConfig"))
    register("project", later("lightning_server.config:ProjectConfig"))


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None] | typer.Typer]], None]) -> None:
    """Register the commands `lightning runner`, `serve`, `token` and `pull`."""
    for name, (place, text) in COMMANDS.items():
        register(name, later(f"lightning_server.{place}", text))
