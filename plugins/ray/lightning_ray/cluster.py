"""The connection to a Ray cluster, ended only by the code that made it.

The invariant: a program that uses Ray itself keeps its connection; no other module here imports `ray` in the trainer's
process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning.config import RunnerConfig
from lightning.errors import MissingExtraError, RunnerError

from lightning_ray.actor import AgentHost
from lightning_ray.config import ActorSettings, RayConfig
from lightning_ray.connection import begin, check_listening, say_which

LOCAL_STARTS = 3
"""How often starting a local cluster is tried: Ray gives up after 30 s, which may not suffice on a busy machine."""
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Size in bytes of a local cluster's object store, which the runner does not use."""


class Reference(Protocol):
    """Ray's handle of an answer that is still to come."""

    def future(self) -> concurrent.futures.Future[Any]:
        """Return the answer as a future."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a cluster. `thread` is set when the connection was made here: then `close` ends it."""

    ray: Any
    thread: concurrent.futures.ThreadPoolExecutor | None

    def here(self) -> str:
        """Return the id of the node that this process runs on; "" if it is on no node."""
        return "" if self.ray.util.client.ray.is_connected() else str(self.ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """Return the resources of each living node, also those in use, by the node's id."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def spans_machines(self) -> bool:
        """Whether an actor may run on another machine than this process."""
        return bool(self.nodes().keys() - {self.here()})

    def actor(self, kind: type, settings: ActorSettings, num_gpus: float, **options: Any) -> Any:
        """Return Ray's maker of actors of this class: `actor(...).remote(...)` asks for one, and Ray starts it when it finds
        room."""
        if settings.memory_bytes:
            options["memory"] = settings.memory_bytes
        return self.ray.remote(kind).options(
            num_cpus=settings.num_cpus,
            num_gpus=num_gpus,
            resources=settings.resources or None,
            scheduling_strategy=settings.scheduling,
            max_restarts=0,  # a lost actor is replaced here: this process knows what ran in it
            **options,
        )

    async def answer(self, reference: Reference, seconds: float | None) -> Any:
        """Wait for an actor's answer, `seconds` at most (None: without a limit), and return it. Raises `TimeoutError`, or
        `ActorLostError` when the actor is lost."""
        coming = asyncio.wrap_future(reference.future())
        coming.add_done_callback(_heard)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(coming)  # Ray sets the future even when nobody waits
        except self.ray.exceptions.RayError as error:
            raise ActorLostError(_first_lines(error)) from error

    def cancel(self, reference: Reference) -> None:
        """Ask the actor to cancel its work for an answer."""
        self.ray.cancel(reference)

    def kill(self, actor: object) -> None:
        """Kill an actor with its processes."""
        if self.ray.is_initialized():  # else the actor ended with the connection, and `kill` would connect again
            self.ray.kill(actor, no_restart=True)

    async def close(self) -> None:
        """Disconnect, if the connection was made here."""
        if self.thread is not None:
            await asyncio.get_running_loop().run_in_executor(self.thread, self.ray.shutdown)
            self.thread.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class RayCluster(Connection):
    """The runner's connection to a cluster."""

    config: RunnerConfig = field(kw_only=True)

    def host(self, shipped: bytes) -> Any:
        """Ask Ray for a new actor, and return its handle."""
        settings = RayConfig.of(self.config)
        options = {"runtime_env": settings.runtime_env} if settings.runtime_env and self.thread is None else {}
        inside = self.config.model_copy(update={"concurrency": settings.agents_per_actor})
        actor = self.actor(AgentHost, settings, settings.num_gpus, **options)
        return actor.remote(shipped, inside.model_dump_json(exclude_defaults=True))


class ActorLostError(RunnerError):
    """An actor died, or could not be started; the message is Ray's."""


def actors_for(config: RunnerConfig) -> int:
    """Return how many actors `runner.concurrency` agents need."""
    return -(-config.concurrency // RayConfig.of(config).agents_per_actor)


async def connect(config: RunnerConfig) -> RayCluster:
    """Connect the runner to its cluster; see `connected`."""
    settings = RayConfig.of(config)
    found = await connected(settings, actors_for(config), runtime_env=settings.runtime_env or None)
    return RayCluster(found.ray, found.thread, config=config)


async def connected(settings: ActorSettings, actors: int, **arguments: Any) -> Connection:
    """Connect to the cluster at `settings.address`, or start a local one for so many `actors` when it is empty. A connection
    that this program already has is used. Further `arguments` are for `ray.init`.

    Raises `MissingExtraError` without the extra `ray`, `RunnerError` when the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    arguments |= {"address": settings.address or "local", "logging_level": logging.WARNING}
    if not settings.address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        arguments |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": max(os.cpu_count() or 1, round(actors * settings.num_cpus + 0.5)),
        }
    for _ in range(1 if settings.address else LOCAL_STARTS):
        # Ray's processes die with the thread that started them, so the thread is kept.
        thread = concurrent.futures.ThreadPoolExecutor(1, "lightning-ray")
        coming = thread.submit(_begin, ray, settings.address, arguments)
        try:
            ours = await asyncio.wrap_future(coming)
        except asyncio.CancelledError:
            thread.submit(_leave, ray, coming)
            thread.shutdown(wait=False)
            raise
        except Exception as error:  # noqa: BLE001 — Ray may raise anything; the last error is reported
            failed = error
            thread.shutdown(wait=False)
        else:
            if not ours:
                thread.shutdown(wait=False)
                say_which(ray, f"{settings.place}.address", settings.address)
            return Connection(ray, thread if ours else None)
    names = " and ".join(f"{settings.place}.{name}" for name in ("address", "runtime_env") if hasattr(settings, name))
    raise RunnerError(
        f"no Ray cluster at {settings.address or 'this machine'}: {failed}. Check {names}, and that the cluster has this Ray "
        "and Python version"
    ) from failed


def _begin(ray: Any, address: str, arguments: dict[str, Any]) -> bool:
    """Connect as `connection.begin` does, unless nothing listens at the address."""
    if not ray.is_initialized():
        check_listening(address)
    return begin(ray, **arguments)


def _leave(ray: Any, coming: concurrent.futures.Future[bool]) -> None:
    """End the connection of a cancelled start, if that start made it."""
    if not coming.cancelled() and coming.exception() is None and coming.result():
        ray.shutdown()


def _first_lines(error: BaseException) -> str:
    """Shorten an error of Ray, which may have pages, to its first four lines and the last."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    kept = lines if len(lines) <= 6 else [*lines[:4], "…", lines[-1]]
    return "\n".join(kept) or type(error).__name__


def _heard(coming: asyncio.Future[Any]) -> None:
    """Read the error of a late answer, so that asyncio does not log it."""
    if not coming.cancelled():
        coming.exception()
