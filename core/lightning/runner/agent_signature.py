"""Whether an agent can be called as `agent(task, llm)`, told before anything is started for it.

The invariant: only what must fail in every rollout is refused. What a call does that Python code does not show (C, builtins,
proxies) is left to the first rollout, and so are the names on a decorated function: what is called is the wrapper.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Mapping
from types import FunctionType, MethodType
from typing import Any

from lightning.errors import RunnerError

CURE = "give a function agent(task, llm) -> reward, or an object that is called so"

PLACEHOLDER = getattr(functools, "Placeholder", object())
"""What stands in a partial (Python 3.14) for an argument of the call."""


def check_agent(agent: object) -> None:
    """Raise `RunnerError`, naming it, for an agent that no call with `(task, llm)` can make return a reward."""
    if not callable(agent):
        raise RunnerError(f"the agent is {agent!r}, which cannot be called: {CURE}")
    target: Any = agent
    arguments: tuple[Any, ...] = (None, None)
    named: dict[str, Any] = {}
    while type(target) in (functools.partial, MethodType):  # not isinstance: proxies claim other types
        if type(target) is MethodType:
            target, arguments = target.__func__, (target.__self__, *arguments)
        elif any(argument is PLACEHOLDER for argument in target.args):
            return
        else:
            target, arguments, named = target.func, (*target.args, *arguments), {**target.keywords, **named}
    if issubclass(type(target), type):
        _check_class(target)
        return
    if type(target) is not FunctionType:
        target, arguments = inspect.getattr_static(type(target), "__call__", None), (target, *arguments)
    if type(target) is FunctionType:
        _check_function(target, arguments, named)


def _check_class(target: Any) -> None:
    """Refuse a class whose objects are no rewards: whoever names one means an object of it."""
    makes_objects = type(target).__call__ is type.__call__ and target.__new__ is object.__new__
    reward = issubclass(target, Mapping | Awaitable) or hasattr(target, "__float__")
    if makes_objects and not reward:
        raise RunnerError(
            f"the agent {target.__module__}.{target.__qualname__} is a class, and calling it makes an object, not a reward: "
            f"give an object of it, such as agent = {target.__name__}(...), whose __call__(self, task, llm) returns the reward"
        )


def _check_function(function: FunctionType, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a function whose own parameters do not take these arguments."""
    # A copy has no attributes: `__wrapped__` and `__signature__` say what decorators pretend, not what they take.
    bare = FunctionType(function.__code__, {}, function.__name__, function.__defaults__, function.__closure__)
    bare.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(bare)
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise RunnerError(
            f"the agent {function.__module__}.{function.__qualname__}, which takes ({', '.join(signature.parameters)}), cannot "
            f"be called with (task, llm): {error}. {CURE[0].upper()}{CURE[1:]}"
        ) from None
