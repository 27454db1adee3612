"""The runner `k8s`: agents run in pods, which lease their work from the run's server as any client does.

The invariant: no agent runs in this process; everything in the cluster is deleted when `attend` ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from lightning.addresses import leads_to_itself
from lightning.asyncio_utils import cancel
from lightning.config import RunnerConfig
from lightning.errors import ConfigError, RunnerError
from lightning.runner.agent_serialization import check_agent, name_of
from lightning.runner.protocol import Agent
from lightning.types import LLM, Lease, Outcome

from lightning_k8s.cluster import Cluster, ClusterError, Object, connect, inside
from lightning_k8s.config import KubernetesConfig
from lightning_k8s.health import Pace
from lightning_k8s.keeper import Jobs, Keeper, Kind, Mirror, Pool
from lightning_k8s.manifests import Manifests, read_template

if TYPE_CHECKING:
    from lightning_server.protocol import Site


class KubernetesRunner:
    """Runs agents in a pool of pods, or in a Job for each rollout (`runner.k8s.mode`). docs/runners.md says what it needs.

    Raises `ConfigError` for settings that make no pod, `RunnerError` for an agent that a pod could not import or call.
    """

    concurrency = 0
    """Zero: no agent runs in this process."""

    def __init__(self, agent: Agent, config: RunnerConfig, pace: Pace | None = None) -> None:
        self._config, self._pace = config, pace or Pace()
        self._settings = KubernetesConfig.of(config)
        if not self._settings.agent:
            check_agent(agent)
        self._agent = self._settings.agent or reference_to(agent)
        self._cluster: Cluster | None = None

    async def start(self) -> None:
        """Load the cluster's credentials. Raises `ConfigError` or `MissingExtraError`. Idempotent."""
        if self._cluster is None:
            self._cluster = await connect(self._settings)

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Raise `RunnerError`: this process leases nothing, so it is never called."""
        raise RunnerError("the runner k8s runs no agent in this process: its pods lease their work themselves")

    async def attend(self, site: Site) -> None:
        """Keep clients running until cancelled, then delete all objects of the run in the cluster.

        Raises `ConfigError` when pods could not reach the server or the settings make no pod; `RunnerError` when no client can
        run: the cluster refuses, no pod runs within `runner.k8s.start_timeout`, or each ends as soon as it starts.
        """
        if self._cluster is None:
            raise RunnerError("the runner k8s has not been started: await runner.start() first")
        cluster = self._cluster
        check_reachable(site.server)
        manifests = Manifests(site, self._config, self._agent, read_template(self._settings.template))
        changed = asyncio.Event()

        def mirror(path: str) -> Mirror:
            return Mirror(cluster, path, manifests.selector, changed, self._pace)

        each = self._settings.mode == "job"
        mirrors = [mirror(path) for path in (("pods", "jobs") if each else ("pods",))]
        kind: Kind = (Jobs if each else Pool)(cluster, manifests, mirrors[-1])
        keeper = Keeper(cluster, manifests, kind, mirrors, changed, self._pace)
        watching = asyncio.create_task(_wake(site, changed)) if each else None
        try:
            await keeper.run(await _own_pod(cluster, self._settings))
        finally:
            if watching is not None:
                await cancel(watching)

    async def close(self) -> None:
        """Disconnect. Idempotent; `start` may follow."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.close()


def reference_to(agent: Agent) -> str:
    """Return the agent as `module:name`. Raises `RunnerError` when importing that name does not give this very object."""
    module, name = getattr(agent, "__module__", ""), getattr(agent, "__qualname__", "")
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        if module != "__main__" and resolve_name(f"{module}:{name}") is agent:
            return f"{module}:{name}"
    raise RunnerError(
        f"the agent {name_of(agent)} has no name that a pod could import: put it into a module of the image and set "
        "runner.k8s.agent to module:name"
    )


def check_reachable(server: str) -> None:
    """Raise `ConfigError` for a server's URL that leads a pod to the pod itself."""
    for url in server.split(","):
        if leads_to_itself(url.strip()):
            raise ConfigError(
                f"pods cannot reach the server at {url}: set server.host to 0.0.0.0 and server.public_url to the address "
                "that the cluster reaches it at, such as that of a Service"
            )


async def _own_pod(cluster: Cluster, config: KubernetesConfig) -> Object | None:
    """Return the trainer's own pod, so that the run's objects are deleted with it; None outside a pod, or where it may not be
    read."""
    if not inside(config):
        return None
    try:
        pod = await cluster.get("pods", os.environ.get("POD_NAME") or socket.gethostname())
    except ClusterError:
        return None
    return {"apiVersion": "v1", "kind": "Pod", **pod}


async def _wake(site: Site, changed: asyncio.Event) -> None:
    """Make the keeper look again as soon as rollouts are created or end. If the store fails, it still looks every few
    seconds."""
    async with site.store.watch(site.run) as watch:
        while True:
            if await watch.wait(60.0):
                changed.set()
