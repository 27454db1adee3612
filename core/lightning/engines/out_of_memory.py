"""What a shortage of memory looks like, and what is said of one that nothing smaller cures.

The invariant: a shortage is told from every other failure, wherever in torch or below it memory ran out; and where no smaller
micro-batch would help it becomes an `EngineError` that says what would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning.errors import EngineError

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say when memory runs out outside torch's CUDA allocator: in the driver, in a library, on a CPU."""

MORE_ROOM = (
    "leave the engine more of the device (a lower policy_server.gpu_memory_utilization, where vLLM is on it), or begin a run "
    "that needs less: LoRA adapters (engine.lora), engine = verl on several GPUs, a smaller model"
)
"""What helps where weights, gradients and moments by themselves are too much."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


@contextmanager
def needing_room(doing: str, cures: str = MORE_ROOM) -> Iterator[None]:
    """A shortage of memory inside the block becomes an `EngineError` that says what was being done and what helps."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise EngineError(f"out of memory while {doing}: {cures}") from error
