"""The plugin `k8s`: agents in pods of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

if TYPE_CHECKING:
    from lightning.config import Config, PluginSettings
    from lightning.runner.protocol import Agent, Runner


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `runner.k8s`."""
    register("runner.k8s", later("lightning_k8s.config:KubernetesConfig"))


@hookimpl
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """Register the runner `k8s`."""
    register("k8s", kubernetes_runner)


def kubernetes_runner(agent: Agent, config: Config) -> Runner:
    """Make the runner whose agents run in pods, as clients of the run's server."""
    from lightning_k8s.runner import KubernetesRunner

    return KubernetesRunner(agent, config.runner)
