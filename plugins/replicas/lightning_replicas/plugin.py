"""The plugin `replicas`: several vLLMs, started or running, serve one policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import PluginSettings
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage
    from lightning.policy_server.servers import ServerSet


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `policy_server.replicas` and `policy_server.gpus_each`."""
    register("policy_server.replicas", later("lightning_replicas.config:ReplicasConfig"))


@hookimpl
def register_server_sets(register: Callable[[str, Callable[[], ServerSet]], None]) -> None:
    """Register the replicas of a policy server."""
    register("replicas", made_later("lightning_replicas.server_set:Replicas"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stage `replicas`, which chooses the server of an attempt."""
    register("replicas", made_later("lightning_replicas.placement:placement"))
