"""The connection to a Ray cluster, ended only by the code that made it.

The invariant: a program that uses Ray itself keeps its connection; of the runner's modules only this one imports `ray`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.config import RunnerConfig
from lightning.errors import MissingExtraError, RunnerError

from lightning_ray.actor import AgentHost
from lightning_ray.config import RayConfig
from lightning_ray.connection import begin

LOCAL_STARTS = 3
"""How often starting a local cluster is tried: Ray gives up after 30 s, which may not suffice on a busy machine."""
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Size in bytes of a local cluster's object store, which the runner does not use."""


class Reference(Protocol):
    """Ray's handle of an answer that is still to come."""

    def future(self) -> concurrent.futures.Future[Any]:
        """Return the answer as a future."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A connection to a cluster. `thread` is set when the connection was made here: then `close` ends it."""

    ray: Any
    config: RunnerConfig
    thread: concurrent.futures.ThreadPoolExecutor | None = None

    def spans_machines(self) -> bool:
        """Whether an actor may run on another machine than this process."""
        if self.ray.util.client.ray.is_connected():
            return True
        here = self.ray.get_runtime_context().get_node_id()
        return any(node["Alive"] and node["NodeID"] != here for node in self.ray.nodes())

    def host(self, shipped: bytes) -> Any:
        """Ask Ray for a new actor, and return its handle; Ray starts it when it finds room."""
        settings = RayConfig.of(self.config)
        options: dict[str, Any] = {
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.num_gpus,
            "resources": settings.resources or None,
            "scheduling_strategy": settings.scheduling,
            "max_restarts": 0,  # the runner replaces a lost actor itself: it knows what ran in it
        }
        if settings.memory_bytes:
            options["memory"] = settings.memory_bytes
        if settings.runtime_env and self.thread is None:
            options["runtime_env"] = settings.runtime_env
        inside = self.config.model_copy(update={"concurrency": settings.agents_per_actor})
        return (
            self.ray.remote(AgentHost).options(**options).remote(shipped, inside.model_dump_json(exclude_defaults=True))
        )

    async def answer(self, reference: Reference, seconds: float) -> Any:
        """Wait for an actor's answer, `seconds` at most, and return it. Raises `TimeoutError`, or `ActorLostError` when the
        actor is lost."""
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


class ActorLostError(RunnerError):
    """An actor died, or could not be started; the message is Ray's."""


def actors_for(config: RunnerConfig) -> int:
    """Return how many actors `runner.concurrency` agents need."""
    return -(-config.concurrency // RayConfig.of(config).agents_per_actor)


async def connect(config: RunnerConfig) -> RayCluster:
    """Connect to the cluster of `runner.ray.address`, or start a local one when it is empty. A connection that this program
    already has is used.

    Raises `MissingExtraError` without the extra `ray`, `RunnerError` when the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    settings = RayConfig.of(config)
    arguments: dict[str, Any] = {
        "address": settings.address or "local",
        "runtime_env": settings.runtime_env or None,
        "logging_level": logging.WARNING,
    }
    if not settings.address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        arguments |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": max(os.cpu_count() or 1, round(actors_for(config) * settings.num_cpus + 0.5)),
        }
    for _ in range(1 if settings.address else LOCAL_STARTS):
        # Ray's processes die with the thread that started them, so the thread is kept.
        thread = concurrent.futures.ThreadPoolExecutor(1, "lightning-ray")
        coming = thread.submit(begin, ray, **arguments)
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
            return RayCluster(ray, config, thread if ours else None)
    raise RunnerError(
        f"no Ray cluster at {settings.address or 'this machine'}: {failed}. Check runner.ray.address and "
        "runner.ray.runtime_env, and that the cluster has this Ray and Python version"
    ) from failed


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
