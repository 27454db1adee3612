"""Calls with a seed on a CPU, where vLLM ends when it takes the draw of such a call back.

The invariant: what a call with a seed samples does not depend on how its prompt was cut into parts, and none ends the engine.

vLLM draws a token also for a part of a prompt, throws it away, and turns the call's generator back by an offset that only
CUDA's generators have: on a CPU that raises `CPU Generator does not use offset`, and the engine is gone with every call in it.
Here the generator gets back the state that it had before the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def keep_seeds(runner: Any) -> None:
    """Let the model runner of a CPU, vLLM's own, turn generators back. One that works otherwise is left as it is."""
    wrappers = {"_sample": _turning_back, "_bookkeeping_sync": _without_generators}
    needed = (*wrappers, "input_batch", "discard_request_mask")
    if getattr(getattr(runner, "device", None), "type", "") == "cpu" and all(hasattr(runner, name) for name in needed):
        for name, wrapped in wrappers.items():
            setattr(runner, name, wrapped(runner, getattr(runner, name)))


def _turning_back(runner: Any, sample: Callable[..., object]) -> Callable[..., object]:
    @wraps(sample)
    def sampled(*args: object, **named: object) -> object:
        generators = runner.input_batch.generators
        if not generators:
            return sample(*args, **named)
        thrown_away = runner.discard_request_mask.np
        before = [(one, one.get_state()) for row, one in generators.items() if thrown_away[row]]
        output = sample(*args, **named)
        for one, state in before:
            one.set_state(state)
        return output

    return sampled


def _without_generators(runner: Any, bookkeeping: Callable[..., object]) -> Callable[..., object]:
    @wraps(bookkeeping)
    def kept(*args: object, **named: object) -> object:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeeping(*args, **named)
        finally:
            batch.generators = generators

    return kept
