"""verl's first worker as the one that sends weights to vLLM: it wrote their file, and over NCCL it has the GPU.

The invariant: the workers do one thing after another, and a transfer is one thing: vLLM, which waits for its next part, never
waits for a step. Where workers have to be started again for a part, the first of the new ones is in no group, and says so.
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

from lightning_verl.device import choose


class FirstWorker:
    """Implements `lightning_attach.sending.Sender`. `call(method, *arguments)` makes a call of the first worker's own sender
    and returns what it answered, and what went wrong; whoever calls the workers holds `turn`."""

    def __init__(self, call: Callable[..., tuple[Any, str]], turn: threading.Lock, config: EngineConfig) -> None:
        self._call, self._turn, self._config = call, turn, config
        self._holds = False

    def check(self, backend: str) -> None:
        """See `Sender.check`."""
        if backend == "nccl" and choose(self._config.device) == "cpu":
            raise no_cuda("for verl's workers (engine.device = 'cuda' where they are on other machines)")

    def hold(self) -> bool:
        """See `Sender.hold`."""
        if not self._turn.acquire(blocking=False):
            return False
        self._holds = True
        return True

    def release(self) -> None:
        """See `Sender.release`."""
        self._holds = False
        self._turn.release()

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        """See `Sender.listen`. A vLLM on the trainer's loopback is where the trainer's machine is, seen from other machines;
        where there are none loopback is kept, which no firewall closes and nobody else hears."""
        if self._config.verl.world_size and is_loopback(towards):
            import ray

            if sum(node["Alive"] for node in ray.nodes()) > 1:  # type: ignore[no-untyped-call]
                towards = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        meeting: Meeting = self._answer("listen", backend, towards, world, seconds)
        return meeting

    def join(self, group: str) -> None:
        """See `Sender.join`."""
        self._answer("join", group)

    def group(self) -> str:
        """See `Sender.group`."""
        return str(self._answer("group"))

    def send(self, files: Sequence[Path]) -> None:
        """See `Sender.send`."""
        self._answer("send", [file.resolve() for file in files])

    def leave(self) -> None:
        """See `Sender.leave`. A `send` is waited for, which ends by itself."""
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
