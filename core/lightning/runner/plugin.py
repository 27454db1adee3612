"""The runners that come with lightning, as a plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning.config import Config
from lightning.hooks import hookimpl
from lightning.runner.protocol import Agent, Runner

logger = logging.getLogger(__name__)


def process_runner(agent: Agent, config: Config) -> Runner:
    """Worker processes; see `lightning.runner.process`."""
    from lightning.runner.process import ProcessRunner

    return ProcessRunner(agent, config.runner)


def inline_runner(agent: Agent, config: Config) -> Runner:
    """This process; see `lightning.runner.inline`."""
    from lightning.runner.inline import InlineRunner

    return InlineRunner(agent, config.runner)


def ray_runner(agent: Agent, config: Config) -> Runner:
    """Actors of a Ray cluster; see `lightning.runner.ray`."""
    from lightning.runner.ray.runner import RayRunner

    return RayRunner(agent, config.runner)


def kubernetes_runner(agent: Agent, config: Config) -> Runner:
    """Pods that are clients of the run's server; see `lightning.runner.k8s`."""
    from lightning.runner.k8s.runner import KubernetesRunner

    return KubernetesRunner(agent, config.runner)


def remote_runner(agent: Agent, config: Config) -> Runner:
    """Clients of the run's server, started by whoever has its URL and a token; see `lightning.runner.remote`."""
    from lightning.runner.remote import RemoteRunner

    if config.runner.sandbox != "none":
        logger.warning(
            "runner.sandbox is %r here and keeps no agent in: with runner='remote' it is a setting of each client; start "
            "them with `lightning runner --set runner.sandbox=%s`",
            config.runner.sandbox,
            config.runner.sandbox,
        )
    return RemoteRunner()


@hookimpl
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """`process` (the default), `inline`, `ray`, `k8s` and `remote`."""
    register("process", process_runner)
    register("inline", inline_runner)
    register("ray", ray_runner)
    register("k8s", kubernetes_runner)
    register("remote", remote_runner)
