"""The connection to a Ray cluster, begun once and ended only by who began it, and the actor that runs agents on a node of it.

The invariant: a program that uses Ray itself keeps its connection; of the runner's modules only this one imports `ray`. An
agent never runs in the actor's process, so neither a crash nor a hang of an agent costs the actor; what the actor says of an
agent is bytes of JSON.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from dataclasses import dataclass
from typing import Any, Protocol

import lightning
from lightning.config import RunnerConfig
from lightning.errors import LightningError, MissingExtraError, RunnerError
from lightning.runner.outcomes import encode_outcome
from lightning.runner.process import ProcessRunner

from lightning_ray.connection import begin


class AgentHost:
    """The actor. It dies with its worker processes, and they with it."""

    def __init__(self, shipped: bytes, config: str) -> None:
        self._runner = ProcessRunner(shipped, RunnerConfig.model_validate_json(config))

    async def start(self, version: str) -> str:
        """Load the agent; return what is wrong, or nothing. `version` is the trainer's release."""
        if version != lightning.__version__:
            return f"a node of the Ray cluster has lightning {lightning.__version__}, the trainer {version}"
        try:
            await self._runner.start()
        except LightningError as error:
            return str(error)
        return ""

    async def run(self, request: bytes) -> bytes:
        """Run the agent on an encoded request; return the encoded outcome. Cancelling this kills the agent."""
        return encode_outcome(await self._runner.answer(request))


LOCAL_STARTS = 3
"""Tries to start a cluster here: Ray gives up after 30 s, in which a busy machine may not get it started."""
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Of a cluster that is started here: nothing of ours goes through it."""


class Reference(Protocol):
    """What Ray gives for an answer that is to come."""

    def future(self) -> concurrent.futures.Future[Any]:
        """The answer."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A connection. `thread` is set when it was made here: then `close` ends it."""

    ray: Any
    config: RunnerConfig
    thread: concurrent.futures.ThreadPoolExecutor | None = None

    def spans_machines(self) -> bool:
        """Whether an actor may be on another machine than this process."""
        if self.ray.util.client.ray.is_connected():
            return True
        here = self.ray.get_runtime_context().get_node_id()
        return any(node["Alive"] and node["NodeID"] != here for node in self.ray.nodes())

    def host(self, shipped: bytes) -> Any:
        """A new actor, which Ray puts somewhere in its own time."""
        settings = self.config.ray
        options: dict[str, Any] = {
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.num_gpus,
            "resources": settings.resources or None,
            "scheduling_strategy": settings.scheduling,
            "max_restarts": 0,  # its place is given to a new one here, which knows what ran in it
        }
        if settings.memory_bytes:
            options["memory"] = settings.memory_bytes
        if settings.runtime_env and self.thread is None:
            options["runtime_env"] = settings.runtime_env
        inside = self.config.model_copy(update={"concurrency": settings.agents_per_actor})
        return self.ray.remote(AgentHost).options(**options).remote(shipped, inside.model_dump_json())

    async def answer(self, reference: Reference, seconds: float) -> Any:
        """The answer of an actor. Raises `TimeoutError`, or `ActorLostError` when it will not come."""
        coming = asyncio.wrap_future(reference.future())
        coming.add_done_callback(_heard)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(coming)  # Ray sets it also when nobody waits any more
        except self.ray.exceptions.RayError as error:
            raise ActorLostError(_first_lines(error)) from error

    def cancel(self, reference: Reference) -> None:
        """Ask the actor to end what it does for an answer."""
        self.ray.cancel(reference)

    def kill(self, actor: object) -> None:
        """End an actor at once, and its processes with it."""
        if self.ray.is_initialized():  # else it has ended with the connection, and this would begin another one
            self.ray.kill(actor, no_restart=True)

    async def close(self) -> None:
        """Disconnect, if it was we who connected."""
        if self.thread is not None:
            await asyncio.get_running_loop().run_in_executor(self.thread, self.ray.shutdown)
            self.thread.shutdown(wait=False)


class ActorLostError(RunnerError):
    """An actor died, or could not be made; the message is Ray's."""


def actors_for(config: RunnerConfig) -> int:
    """How many actors run `runner.concurrency` agents."""
    return -(-config.concurrency // config.ray.agents_per_actor)


async def connect(config: RunnerConfig) -> RayCluster:
    """Connect to the cluster of `runner.ray.address`, or start one; a connection that this program has is used.

    Raises `MissingExtraError` without the extra `ray`, `RunnerError` when the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    settings = config.ray
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
        # Ray's processes die with the thread that started them, so it is kept until they are to end.
        thread = concurrent.futures.ThreadPoolExecutor(1, "lightning-ray")
        coming = thread.submit(begin, ray, **arguments)
        try:
            ours = await asyncio.wrap_future(coming)
        except asyncio.CancelledError:
            thread.submit(_leave, ray, coming)
            thread.shutdown(wait=False)
            raise
        except Exception as error:  # noqa: BLE001 — Ray raises whatever it likes; the last one is told
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
    """End the connection of a start that nobody waits for any more, if it was made by it."""
    if not coming.cancelled() and coming.exception() is None and coming.result():
        ray.shutdown()


def _first_lines(error: BaseException) -> str:
    """Ray's messages are whole pages; the first lines, and the last, say it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    kept = lines if len(lines) <= 6 else [*lines[:4], "…", lines[-1]]
    return "\n".join(kept) or type(error).__name__


def _heard(coming: asyncio.Future[Any]) -> None:
    """An error that comes after its time is no news."""
    if not coming.cancelled():
        coming.exception()
