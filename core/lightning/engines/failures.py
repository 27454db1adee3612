"""Two ways in which a step fails: memory runs out, or its loss or gradient is not finite.

The invariant: a shortage of memory is told from every other failure, wherever in torch or below it memory ran out; and where no
smaller micro-batch would help it becomes an `EngineError` that says what would. A step that is not finite is skipped, counted
and said, a bounded number of times in a row; it leaves weights, moments and schedule as they were, so the same rows on the same
weights are skipped again when a run is resumed.
"""

from __future__ import annotations

import logging
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


logger = logging.getLogger(__name__)

CURES = "lower engine.lr or engine.max_grad_norm, or compute in float32 (engine.dtype)"


class NonFiniteError(EngineError):
    """An update cannot be taken: what is not finite, and where."""


class NonFiniteSteps:
    """Counts the updates that were left out since the last one that was taken; one more than `most` in a row is an error."""

    def __init__(self, most: int) -> None:
        self._most, self.row = most, 0

    def skipped(self, error: NonFiniteError) -> None:
        """An update was left out. Raises `EngineError` where it is one too many in a row."""
        self.row += 1
        if self.row > self._most:
            raise EngineError(
                f"{error}, so this update was not taken. It is the {_ordinal(self.row)} in a row, "
                f"more than engine.max_nonfinite_steps = {self._most}: resume the run with other settings ({CURES}), or go on "
                "from an earlier checkpoint if the weights themselves are no longer finite"
            ) from error
        logger.warning(
            "%s: the step is skipped, and weights and optimizer are as before (%d in a row; engine.max_nonfinite_steps = %d). "
            "If it happens again: %s",
            error,
            self.row,
            self._most,
            CURES,
        )


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
