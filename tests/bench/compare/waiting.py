"""The example's agent with tools that take their time, as a database or a web service does; nothing else is changed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning.types import LLM, Task
from lightning_examples.raw_python import agent as example

_UNTOUCHED = dict(example.FUNCTIONS)


def set_tool_seconds(seconds: float) -> None:
    """Let every tool of this process wait so long before it answers; 0 gives the example's own tools back."""
    for name, function in _UNTOUCHED.items():
        example.FUNCTIONS[name] = _slowly(function, seconds) if seconds else function


def _slowly(function: Callable[..., str], seconds: float) -> Callable[..., str]:
    @functools.wraps(function)
    def tool(*values: str, **named: str) -> str:
        time.sleep(seconds)
        return function(*values, **named)

    return tool


@dataclass(frozen=True, slots=True)
class WaitingAgent:
    """The example's agent, in whose process tools take `seconds` each."""

    seconds: float

    def __call__(self, task: Task, llm: LLM) -> float:
        """Solve one problem; returns the reward."""
        set_tool_seconds(self.seconds)
        return example.agent(task, llm)
