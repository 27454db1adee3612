"""verl's first worker as the sender of weights to vLLM: it wrote their file, and over NCCL it has the GPU.

The invariant: workers do one thing after another, and a whole transfer is one such thing, so that vLLM, which waits for the
next part, never waits for a step. If workers are started again during a transfer, the new first worker is in no group, and says
so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.addresses import is_loopback
from lightning.config import EngineConfig
from lightning.errors import LightningError, PolicyServerError
from lightning_attach.sending import Meeting
from lightning_attach.transfer import no_cuda

from lightning_verl.config import VerlConfig
from lightning_verl.device import choose


class FirstWorker:
    """Sends weights from the first worker. Implements `lightning_attach.sending.Sender`. `call(method, *arguments)` calls the
    first worker's own sender, and returns its answer and its error. Every call to the workers needs the lock `turn`."""

    def __init__(self, call: Callable[..., tuple[Any, str]], turn: threading.Lock, config: EngineConfig) -> None:
        self._call, self._turn, self._config = call, turn, config
        self._holds = False

    def check(self, backend: str) -> None:
        """Raise `ConfigError` for NCCL without GPUs."""
        if backend == "nccl" and choose(self._config.device) == "cpu":
            raise no_cuda("for verl's workers (engine.device = 'cuda' where they are on other machines)")

    def hold(self) -> bool:
        """Reserve the workers for a transfer; return False when they are busy."""
        if not self._turn.acquire(blocking=False):
            return False
        self._holds = True
        return True

    def release(self) -> None:
        """Release the workers."""
        self._holds = False
        self._turn.release()

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        """Leave the present group and listen for a new one. When vLLM is on the trainer's loopback and the cluster has several
        machines, the worker listens towards the trainer's machine instead; with one machine loopback is kept, which no firewall
        closes and no other machine can reach."""
        if VerlConfig.of(self._config).world_size and is_loopback(towards):
            import ray

            if sum(node["Alive"] for node in ray.nodes()) > 1:  # type: ignore[no-untyped-call]
                towards = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        meeting: Meeting = self._answer("listen", backend, towards, world, seconds)
        return meeting

    def join(self, group: str) -> None:
        """Wait until all receivers have joined; the new group has the name `group`."""
        self._answer("join", group)

    def group(self) -> str:
        """Return the name of the present group; empty without one."""
        return str(self._answer("group"))

    def send(self, files: Sequence[Path]) -> None:
        """Send every tensor of some safetensors files."""
        self._answer("send", [file.resolve() for file in files])

    def leave(self) -> None:
        """Leave the group. A `send` that is under way is waited for; it ends by itself."""
        self._answer("leave")

    def _answer(self, method: str, *arguments: object) -> Any:
        try:
            with nullcontext() if self._holds else self._turn:
                answer, problem = self._call(method, *arguments)
        except LightningError as error:
            raise PolicyServerError(f"verl's workers, which send the weights, are gone: {error}") from error
        if problem:
            raise PolicyServerError(f"verl's first worker: {problem}")
        return answer
