"""Agents that cannot be called as `agent(task, llm)` are refused; whatever a runner can call is not."""

from __future__ import annotations

import asyncio
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
from lightning.config import RunnerConfig
from lightning.errors import RunnerError
from lightning.runner.agent_serialization import check_agent, pack_agent
from lightning.runner.inline import InlineRunner
from lightning.runner.worker import run_agent
from lightning.types import LLM, Task

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")


def plain(task: Task, llm: LLM) -> float:
    return 1.0


async def asynchronous(task: Task, llm: LLM, *, bonus: float = 1.0) -> float:
    return bonus


def one(task: Task) -> float:
    return 1.0


def three(first: float, task: Task, llm: LLM, *, bonus: float) -> float:
    return first * bonus


@functools.wraps(one)
def claims_one(*args: object) -> float:
    return one(args[0])  # type: ignore[arg-type]


@functools.wraps(plain)
def claims_two(task: Task) -> float:
    return 1.0


def signed(task: Task, llm: LLM) -> float:
    return 1.0


signed.__signature__ = "of another one"  # type: ignore[attr-defined]


class Agent:
    """Most of what a class can make an agent of."""

    def __init__(self, model: str = "") -> None:
        self.model = model

    def __call__(self, task: Task, llm: LLM) -> float:
        return 1.0

    def run(self, task: Task, llm: LLM) -> float:
        return 1.0

    @classmethod
    def made(cls, task: Task, llm: LLM) -> float:
        return 1.0

    @staticmethod
    def alone(task: Task, llm: LLM) -> float:
        return 1.0


class Decorated:
    @functools.wraps(one)
    def __call__(self, *args: object) -> float:
        return 1.0


class Static:
    @staticmethod
    def __call__(task: Task, llm: LLM) -> float:
        return 1.0


class Proxy:
    """Claims to be a function of one argument, as wrapt's does."""

    __code__, __closure__, __defaults__, __kwdefaults__ = one.__code__, None, None, None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(one)

    def __call__(self, *args: object, **named: object) -> float:
        return 1.0


class Number:
    def __init__(self, task: Task, llm: LLM) -> None: ...

    def __float__(self) -> float:
        return 1.0


class Parts(dict[str, float]):
    def __init__(self, task: Task, llm: LLM) -> None:
        super().__init__(reward=1.0)


class Later:
    def __init__(self, task: Task, llm: LLM) -> None: ...

    def __await__(self) -> Iterator[Any]:
        return asyncio.sleep(0, 1.0).__await__()


class Function:
    def __new__(cls, task: Task, llm: LLM) -> float:  # type: ignore[misc]
        return 1.0


class Meta(type):
    def __call__(cls, task: Task, llm: LLM) -> float:
        return 1.0


class Called(metaclass=Meta): ...


CALLABLE: list[Callable[..., object]] = [
    plain,
    asynchronous,
    lambda *args: 1.0,
    lambda task, *rest, **named: 1.0,
    lambda a, b, c=None: 1.0,
    claims_one,
    signed,
    Agent(),
    Agent().run,
    Agent.made,
    Agent.alone,
    Decorated(),
    Decorated().__call__,
    Static(),
    Proxy(),
    functools.partial(plain),
    functools.partial(three, 1.0, bonus=1.0),
    functools.partial(functools.partial(three, bonus=2.0), 1.0, bonus=1.0),
    functools.partial(Agent.run, Agent()),
    functools.singledispatch(plain),
    MagicMock(return_value=1.0),
    create_autospec(plain, return_value=1.0),
    Number,
    Parts,
    Later,
    Function,
    Called,
]


@pytest.mark.parametrize("agent", CALLABLE)
def test_what_a_worker_can_call_is_accepted(agent: Any) -> None:
    check_agent(agent)
    with asyncio.Runner() as loop:
        outcome = run_agent(agent, Task(1), NOWHERE, loop)
    assert (outcome.reward, outcome.error) == (1.0, ""), "or the list above is wrong"


@pytest.mark.parametrize("agent", [math.hypot, print, dict.get, float, max, "".join])
def test_what_cannot_be_told_is_left_to_the_first_rollout(agent: Any) -> None:
    check_agent(agent)


def test_a_partial_may_leave_places_open(monkeypatch: pytest.MonkeyPatch) -> None:
    place = object()
    monkeypatch.setattr("lightning.runner.agent_serialization.PLACEHOLDER", place)
    check_agent(functools.partial(plain, place, None))


@dataclass
class Configured:
    prompt: str

    def __call__(self, task: Task, llm: LLM) -> float:
        return 1.0


class Abstract(ABC):
    @abstractmethod
    def __call__(self, task: Task, llm: LLM) -> float: ...


class Takes:
    def __init__(self, task: Task, llm: LLM) -> None: ...

    def __call__(self, task: Task) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("agent", r"the agent is 'agent', which cannot be called: give a function agent\(task, llm\) -> reward"),
        (math, "which cannot be called"),
        (
            Agent,
            r"test_agent_signature.Agent is a class, .* an object of it, such as agent = Agent\(\.\.\.\), whose __call__",
        ),
        (Configured, "Configured is a class"),
        (Abstract, "Abstract is a class"),
        (Takes, "Takes is a class"),
        (
            one,
            r"test_agent_signature.one, which takes \(task\), cannot be called with \(task, llm\): too many .* Give a function",
        ),
        (lambda: 1.0, r"<lambda>, which takes \(\), cannot be called"),
        (lambda *, task, llm: 1.0, "cannot be called with"),
        (three, "missing a required argument: 'llm'"),
        (claims_two, r"which takes \(task\), cannot"),
        (Agent.run, r"Agent.run, which takes \(self, task, llm\), cannot be called with \(task, llm\): missing"),
        (Takes(None, None), r"Takes.__call__, which takes \(self, task\), cannot"),  # type: ignore[arg-type]
        (functools.partial(plain, 1), "plain, which takes .* cannot be called"),
        (functools.partial(plain, llm=1), "multiple values for argument 'llm'"),
        (functools.partial(Agent().run, nobody=1), "nobody"),
    ],
)
def test_what_fails_in_every_rollout_is_refused_by_every_runner_here(agent: Any, says: str) -> None:
    for refuse in (check_agent, pack_agent, lambda agent: InlineRunner(agent, RunnerConfig())):
        with pytest.raises(RunnerError, match=says):
            refuse(agent)
    if callable(agent):
        with asyncio.Runner() as loop:
            assert run_agent(agent, Task(1), NOWHERE, loop).reward is None, "or it may not be refused"
