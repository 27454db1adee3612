"""A step that taught nothing is history, and costs neither a checkpoint nor an update of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any


async def test_a_server_that_died_after_an_idle_step_comes_back_with_its_weights(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.loop.run({})
        weights = made.loop.stack.weights
        await made.loop.publisher.relabel(7)
        assert (made.loop.stack.weights, made.loop.stack.version, made.policy.version) == (weights, 7, 7)
