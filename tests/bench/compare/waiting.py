"""A demonstration's agent with tools that take their time, as a database or a web service does; nothing else is changed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning.types import LLM, Task


def slowly(function: Callable[..., str], seconds: float) -> Callable[..., str]:
    """A tool that waits so long before it answers."""

    @functools.wraps(function)
    def tool(*values: str, **named: str) -> str:
        time.sleep(seconds)
        return function(*values, **named)

    return tool


@dataclass(frozen=True, slots=True)
class WaitingTiny:
    """The agent of `lightning demo tiny`, in whose process tools take `seconds` each."""

    seconds: float

    def __call__(self, task: Task, llm: LLM) -> float:
        """Solve one problem; returns the reward."""
        from lightning_examples.raw_python import agent as example

        if example.FUNCTIONS is not _slowed:
            _slowed.update({name: slowly(tool, self.seconds) for name, tool in example.FUNCTIONS.items()})
            example.FUNCTIONS = _slowed
        return example.agent(task, llm)


_slowed: dict[str, Callable[..., str]] = {}


@dataclass(frozen=True, slots=True)
class WaitingCalculator:
    """The agent of `lightning demo calculator`, whose calculator takes `seconds`; AutoGen runs such a tool in a thread."""

    seconds: float

    async def __call__(self, task: Task, llm: LLM) -> dict[str, float]:
        """Solve one problem; returns its rewards."""
        from autogen_core.tools import FunctionTool
        from lightning_examples.calculator_autogen import agent as example

        example.CALCULATOR = FunctionTool(slowly(example.calculate, self.seconds), description="", name="calculate")
        return await example.agent(task, llm)


WAITING = {"tiny": WaitingTiny, "calculator": WaitingCalculator}
