"""Makes agents (functions of scripts and notebooks, closures, bound methods, objects) travel to worker processes, after a check
that they can be called as `agent(task, llm)`.

The invariant: a worker never re-executes the user's script. What was defined in `__main__`, or in a module that a new process
could not import, is pickled by value; everything else by name. Only an agent that must fail in every rollout is refused. Calls
whose parameters Python code does not show (C, builtins, proxies) are left to the first rollout. Of a decorated function the
wrapper is checked, since the wrapper is called.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import sysconfig
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from lightning.errors import RunnerError
from lightning.runner.protocol import Agent

CURE = "give a function agent(task, llm) -> reward, or an object that can be called like one"

PLACEHOLDER = getattr(functools, "Placeholder", object())
"""Marks, in a `functools.partial` of Python 3.14, an argument that the call fills in."""


def check_agent(agent: object) -> None:
    """Raise `RunnerError`, with the agent's name, for an agent whose call with `(task, llm)` can never return a reward."""
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
    """Raise `RunnerError` for a class whose objects are no rewards: its user meant an object of the class."""
    makes_objects = type(target).__call__ is type.__call__ and target.__new__ is object.__new__
    reward = issubclass(target, Mapping | Awaitable) or hasattr(target, "__float__")
    if makes_objects and not reward:
        raise RunnerError(
            f"the agent {target.__module__}.{target.__qualname__} is a class, and calling it makes an object, not a reward: "
            f"give an object of it, such as agent = {target.__name__}(...), whose __call__(self, task, llm) returns the reward"
        )


def _check_function(function: FunctionType, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise `RunnerError` for a function whose own parameters do not take these arguments."""
    # The copy has no `__wrapped__` and no `__signature__`, with which decorators claim other parameters than they take.
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


_LIBRARIES = tuple({str(Path(path)) + os.sep for name, path in sysconfig.get_paths().items() if name.endswith("lib")})
"""The folders of the standard library and of installed packages: `stdlib`, `platstdlib`, `purelib`, `platlib`."""


def name_of(agent: Agent) -> str:
    """Return the module and the name of an agent, for messages."""
    name = getattr(agent, "__qualname__", None) or type(agent).__qualname__
    return f"{_module_name(agent)}.{name}"


def pack_agent(agent: Agent) -> bytes:
    """Return the agent as bytes for `cloudpickle.loads`.

    Raises `RunnerError` when it cannot be called with (task, llm), or when part of it cannot leave this process.
    """
    check_agent(agent)
    by_value = _homeless(_module_name(agent))
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(agent)
    except Exception as error:
        raise RunnerError(
            f"the agent {name_of(agent)} cannot be sent to a worker process: {error}. Make clients, locks and open files "
            "inside the agent or in an imported module, or run it in this process with runner='inline'"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def unpack_agent(shipped: bytes) -> Agent:
    """Load an agent that `pack_agent` packed, in a worker process. An error in a module that this imports propagates."""
    agent: Agent = cloudpickle.loads(shipped)
    return agent


def pack_stages(stages: object) -> bytes:
    """Pickle stages of plugins for the processes of agents. Raises what `pickle` raises."""
    return pickle.dumps(stages)


def unpack_stages(shipped: bytes) -> Any:
    """Load the stages that `pack_stages` pickled, in a process of agents."""
    return pickle.loads(shipped)  # noqa: S301 — from the runner


def _module_name(agent: Agent) -> str:
    while isinstance(agent, functools.partial):
        agent = agent.func
    return str(getattr(agent, "__module__", None) or type(agent).__module__)


def _homeless(of_agent: str) -> list[ModuleType]:
    """Return the user's modules that a new process could not import. What the agent refers to in them is pickled by value."""
    found = []
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not isinstance(module, ModuleType) or vars(module).get("__name__") != name:
            continue  # an alias; and cloudpickle takes care of `__main__` itself
        if (name == of_agent or not is_installed(vars(module).get("__file__"))) and not _importable(module):
            found.append(module)
    return found


def is_installed(file: object) -> bool:
    """Whether a module belongs to the standard library or an installed package, or has no file."""
    return not isinstance(file, str) or file.startswith(_LIBRARIES)


def _importable(module: ModuleType) -> bool:
    """Whether a new process with the same `sys.path` would find this very file under the module's name."""
    file = getattr(module, "__file__", None)
    if file is None:  # built in: there is no file to miss
        return True
    path: list[str] | None = None
    origin: str | None = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        spec = None
        for finder in sys.meta_path:
            try:
                spec = finder.find_spec(".".join(parts[:depth]), path)
            except (AttributeError, ImportError, ValueError):
                continue  # a finder that cannot tell
            if spec is not None:
                break
        if spec is None:
            return False
        origin = spec.origin
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    return bool(origin == file)
