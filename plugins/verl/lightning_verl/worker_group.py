"""The workers of one training job, in this process or on Ray: one call on all ranks returns each rank's answer.

The invariant: a call ends on all ranks or raises. After `WorkersLostError` none of the group's processes is left.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from lightning.engines.step import MORE_ROOM, ran_out
from lightning.errors import ConfigError, EngineError, LightningError, WorkersLostError
from lightning_ray.connection import begin, say_which

from lightning_verl import api
from lightning_verl.config import VerlConfig
from lightning_verl.device import environment
from lightning_verl.worker import PolicyWorker

logger = logging.getLogger(__name__)
T = TypeVar("T")

ENDED = "the workers of the verl engine have ended after an error: resume the run"
CPUS_FOR_RAY = 2
"""CPUs of a local cluster besides one for each worker, for Ray's own work while workers are placed."""
NOTICED_WITHIN = 30.0
"""Seconds in which Ray reports a worker's death after its neighbours' collective broke off."""
_ONLY_ONE = threading.Lock()
"""Held while a rank is in this process. A second rank would compute in the first one's process groups, which end with it."""


class Group(Protocol):
    """All ranks of a job. `size` is their number."""

    size: int

    def run(self, method: str, parts: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Call a method of `PolicyWorker` on every rank, each with its own arguments in `parts`, and return the answers."""

    def close(self) -> None:
        """End the workers. Idempotent."""


class Alone:
    """A group of one rank, in this process. It runs in a thread of its own, which ends with it.

    Torch keeps process groups for each thread that has computed with DTensors, even after they were destroyed. When another
    thread forks, as Ray does to start its processes, the child has no such thread, but tries to join the group's threads: it
    hangs or crashes.
    """

    size = 1

    def __init__(self, worker_config: Any, arguments: Mapping[str, Any]) -> None:
        """Start the worker. Raises `EngineError` while another rank is in this process, and when the worker cannot be made."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if not _ONLY_ONE.acquire(blocking=False):
            raise EngineError(
                "another verl engine is open in this process, which has one set of torch's process groups: close that one "
                "first, or give this one a worker process of its own (engine.verl.world_size = 1)"
            )
        self._open = True
        alone = {
            "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        before = {name: os.environ.get(name) for name in alone}
        self._owns_processes = not dist.is_initialized()
        os.environ.update(alone)
        self._thread = ThreadPoolExecutor(1, "lightning-verl")
        try:
            self._worker: PolicyWorker | None = self._done("the start", PolicyWorker, worker_config, **arguments)
        except BaseException:
            self._leave()
            raise
        finally:  # agents and vLLM inherit this process's environment
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})

    def run(self, method: str, parts: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Call a method of the worker, and return its answer in a list."""
        if self._worker is None:
            raise EngineError(ENDED)
        return [self._done(method, getattr(self._worker, method), *parts[0], **named)]

    def close(self) -> None:
        """End the worker and its thread. Idempotent."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                self._done("the end", worker.end)
        finally:
            self._leave()

    def _done(self, what: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Run a function in the worker's thread and return its result. Raises `EngineError` for any error."""
        try:
            return self._thread.submit(function, *arguments, **named).result()
        except LightningError:
            raise
        except Exception as error:
            if ran_out(error):
                raise EngineError(
                    f"out of memory in {what} of the verl engine: lower engine.tokens_per_microbatch or set "
                    f"engine.gradient_checkpointing = true and resume the run; or {MORE_ROOM}"
                ) from error
            raise EngineError(f"{what} of the verl engine failed: {error!r}") from error

    def _leave(self) -> None:
        if not self._open:
            return  # a later engine may own the lock and the process groups by now
        self._open = False
        try:
            if self._owns_processes and dist.is_initialized():
                dist.destroy_process_group()
            self._thread.shutdown()
        finally:
            _ONLY_ONE.release()


class OnRay:
    """A group on Ray: one actor for each rank, placed by verl in the cluster that `connect` returned."""

    def __init__(
        self, config: VerlConfig, worker_config: Any, arguments: Mapping[str, Any], device: str, *, again: bool
    ) -> None:
        """Place and start the workers. With `again` they replace lost workers, so that missing machines are waited for."""
        import ray

        self.size, self._ray = config.world_size, ray
        each = _room(ray, config, config.start_timeout if again else 0.0)
        self._pool = api.RayResourcePool([each] * config.nodes, use_gpu=True, max_colocate_count=1)
        self._workers: list[Any] = []
        made = api.RayClassWithInitArgs(ray.remote(PolicyWorker), config=worker_config, **arguments)
        needed = environment(device, local=not config.address)
        name = api.get_device_name()
        try:
            self._pool.pgs = _placed(ray, config, each)
            self._workers += api.RayWorkerGroup(self._pool, made, device_name=name, worker_env=needed).workers
            self.run("place", [()] * self.size, patience=config.start_timeout)
        except BaseException:
            self.close()
            raise

    def run(
        self, method: str, parts: Sequence[tuple[Any, ...]], patience: float | None = None, **named: Any
    ) -> list[Any]:
        """Call a method on every rank, and return the answers. Raises `WorkersLostError` when a worker died, `EngineError` when
        one failed."""
        if not self._workers:
            raise EngineError(ENDED)
        errors = self._ray.exceptions
        calls = [
            getattr(worker, method).remote(*part, **named) for worker, part in zip(self._workers, parts, strict=True)
        ]
        waiting, end = list(calls), time.monotonic() + patience if patience else None
        try:
            while waiting:
                # The first failure ends the call, because other ranks may wait for that rank in a collective.
                left = None if end is None else max(0.0, end - time.monotonic())
                done, waiting = self._ray.wait(waiting, num_returns=1, timeout=left)
                if not done:
                    raise EngineError(f"verl's workers did not start within {patience:.0f} s: see Ray's logs")
                self._ray.get(done)
            return list(self._ray.get(calls))
        except errors.RayError as error:
            try:
                cause = self._cause(error, waiting)
            except errors.RayError as other:  # the connection is gone, too
                cause = other
            finally:
                self.close()
            raise self._failure(method, cause) from error

    def _cause(self, error: Exception, waiting: list[Any]) -> Exception:
        """Return the error that caused a failed call. When a worker dies, its neighbours' collectives fail too, and Ray may
        report those first."""
        failed, end = self._ray.exceptions.RayTaskError, time.monotonic() + NOTICED_WITHIN
        if not isinstance(error, failed) or ran_out(error):
            return error
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not done:
                break
            try:
                self._ray.get(done)
            except self._ray.exceptions.RayError as other:
                if not isinstance(other, failed) or ran_out(other):
                    return other
        return error

    def _failure(self, method: str, error: Exception) -> EngineError:
        errors = self._ray.exceptions
        if isinstance(error, errors.RayActorError | errors.ObjectLostError | errors.NodeDiedError):
            return WorkersLostError(f"a worker of the verl engine died in {method}: {error}")
        if isinstance(error, errors.RayTaskError):
            if ran_out(error):
                return WorkersLostError(f"out of memory in {method} of the verl engine")
            return EngineError(f"{method} failed on a worker of the verl engine: {error}")
        if isinstance(error, errors.OutOfMemoryError):  # Ray itself ends a worker whose machine is short of memory
            return WorkersLostError(f"out of memory on a worker's machine in {method}: {error}")
        return WorkersLostError(f"Ray lost a worker of the verl engine in {method}: {error}")

    def close(self) -> None:
        """Kill the workers and remove their placement groups. Idempotent."""
        workers, self._workers = self._workers, []
        if not self._ray.is_initialized():
            return  # the workers have ended with the connection, and `ray.kill` would begin another one
        for worker in workers:
            with suppress(Exception):  # it may be dead already, or Ray gone; it only must not be left
                self._ray.kill(worker, no_restart=True)
        for places in self._pool.pgs or ():
            with suppress(Exception):
                self._ray.util.remove_placement_group(places)


def connect(config: VerlConfig, device: str) -> bool:
    """Connect this process to the cluster at `engine.verl.address`, or start a local one. A connection that the process already
    has is used. Return True if a cluster was started here, so that the caller ends it with `ray.shutdown`.

    Raises `ConfigError` when no cluster answers at the address, `EngineError` when none could be started here.
    """
    import ray

    local: dict[str, Any] = {"num_cpus": config.world_size + CPUS_FOR_RAY, "include_dashboard": False}
    if device == "cpu":
        # Workers ask for a GPU each, wherever they are: here one stands for a process.
        local |= {"num_gpus": config.world_size, "object_store_memory": 256 * 2**20}
    given = {"address": config.address} if config.address else {"address": "local", **local}
    for tries_left in (1, 0):
        try:
            if not begin(ray, **given, log_to_driver=False, logging_level=logging.ERROR, namespace="lightning"):
                say_which(ray, "engine.verl.address", config.address)
                return False
            break
        except Exception as error:  # Ray waits 30 s for its own processes, then raises nothing narrower
            if config.address:
                raise ConfigError(
                    f"cannot reach the Ray cluster engine.verl.address = {config.address!r}: {error}"
                ) from error
            if not tries_left:
                raise EngineError(
                    f"Ray did not start on this machine, twice: {error} On a busy one start it beforehand (`ray start --head "
                    f"--num-gpus={config.world_size}`) and set engine.verl.address = auto; Ray's logs "
                    "are in /tmp/ray/session_latest"
                ) from error
            logger.warning("Ray did not start; it is started once more: %s", error)
    return not config.address


def _room(ray: Any, config: VerlConfig, patience: float) -> int:
    """Return the number of workers on each node. Missing machines are waited for, `patience` seconds. Raises `ConfigError` when
    the cluster cannot hold all workers: Ray would wait for ever."""
    each, rest = divmod(config.world_size, config.nodes)
    if rest:
        raise ConfigError(
            f"engine.verl.world_size is {config.world_size}, which engine.verl.nodes = {config.nodes} does not divide"
        )
    end = time.monotonic() + patience
    while True:
        nodes = sorted((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
        if len([gpus for gpus in nodes if gpus >= each]) >= config.nodes:
            return each
        if time.monotonic() >= end:
            raise ConfigError(
                f"engine.verl wants {config.world_size} workers on {config.nodes} nodes, {each} GPUs on each; the Ray cluster "
                f"has nodes with {', '.join(map(str, nodes)) or 'no'} GPUs. Lower engine.verl.world_size, or raise "
                "engine.verl.nodes; on a machine without GPUs give the engine a Ray of its own (engine.verl.address empty, "
                "and no Ray runner in the same process)"
            )
        time.sleep(1.0)


def _placed(ray: Any, config: VerlConfig, each: int) -> list[Any]:
    """Return placement groups for the workers, one for each node. Raises `EngineError` when the cluster has no room within
    `start_timeout`."""
    bundle = {"CPU": 1, "GPU": 1}
    groups = [ray.util.placement_group([bundle] * each, strategy="STRICT_PACK") for _ in range(config.nodes)]
    ready = [group.ready() for group in groups]
    done, _ = ray.wait(ready, num_returns=len(ready), timeout=config.start_timeout)
    if len(done) < len(ready):
        for group in groups:
            ray.util.remove_placement_group(group)
        raise EngineError(
            f"the Ray cluster had no room for {config.world_size} workers within {config.start_timeout:.0f} s "
            "(engine.verl.start_timeout): other jobs hold its GPUs"
        )
    placed: list[Any] = api.sort_placement_group_by_node_ip(groups)
    return placed
