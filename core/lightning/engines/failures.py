"""Two ways in which a step fails: memory runs out, or its loss or gradient is not finite.

The invariant: a shortage of memory is told from every other failure, wherever in torch or below it memory ran out; and where no
smaller micro-batch would help it becomes an `EngineError` that says what would.
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
SMALLER_ROWS = "begin a new run with LoRA adapters (engine.lora) or shorter calls (policy_server.max_model_len)"
"""What helps where a single row is."""


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


CURES = "lower engine.lr or engine.max_grad_norm, or compute in float32 (engine.dtype)"


class NonFiniteError(EngineError):
    """An update cannot be taken: what is not finite, and where."""
