"""The methods of CrewAI that run agents, tasks, flows and tools, replaced while the adapter is installed.

The invariant: a method does what it did, with the arguments that it got.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning
from crewai.agent.core import Agent
from crewai.agents import step_executor
from crewai.agents.crew_agent_executor import CrewAgentExecutor
from crewai.events.event_bus import CrewAIEventsBus
from crewai.experimental.agent_executor import AgentExecutor
from crewai.flow.runtime import Flow
from crewai.lite_agent import LiteAgent
from crewai.llms.base_llm import BaseLLM
from crewai.llms.base_llm import _current_call_id as current_call_id
from crewai.task import Task
from crewai.tools.tool_usage import ToolUsage
from crewai.utilities.agent_utils import extract_tool_call_info
from crewai.utilities.string_utils import sanitize_tool_name
from lightning.instrument import Scopes, replace_method

from lightning_crewai.tools import ToolRequest, hear_of_model, is_end

scopes = Scopes("crewai")
"""The subject of an agent's scope is the model call that it runs in, if any; that of a tool's is its `ToolRequest`."""


class CrewMethods:
    """Which methods have been replaced."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Replace them. Again: does nothing."""
        if self._undo:
            return
        for owner, names, enter in (
            (Agent, ("execute_task", "aexecute_task", "kickoff", "kickoff_async"), _agent),
            (LiteAgent, ("kickoff",), _agent),
            (Task, ("_execute_core", "_aexecute_core"), _task),
            (Flow, ("_execute_method",), _flow),
            (ToolUsage, ("use", "ause"), _text_tool),
            (AgentExecutor, ("_execute_single_native_tool_call",), _native_tool),
            (CrewAgentExecutor, ("_execute_single_native_tool_call",), _native_tool),
            (step_executor, ("execute_single_native_tool_call",), _native_tool),
        ):
            for name in names:
                self._undo.append(replace_method(owner, name, functools.partial(_inside, enter)))
        self._undo.append(replace_method(CrewAIEventsBus, "emit", _heard))

    def stop(self) -> None:
        """Put them back."""
        while self._undo:
            self._undo.pop()()


methods = CrewMethods()


def caller_now() -> lightning.Caller | None:
    """Who sends a request from this thread or task."""
    scope, call = scopes.here(), current_call_id.get()
    caller = scopes.caller(scope) if scope else None
    if scope is None or caller is None or not call or call == _call_around(scope.subject):
        return caller
    return replace(caller, span_id=call, parent_id=scope.id)


def _call_around(subject: object) -> object:
    return subject.call if isinstance(subject, ToolRequest) else subject


def _inside(enter: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The method, run in the scopes that `enter` opens for its arguments."""
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def run_async(*args: Any, **more: Any) -> Any:
            with enter(*args, **more):
                return await original(*args, **more)

        return run_async

    @functools.wraps(original)
    def run(*args: Any, **more: Any) -> Any:
        with enter(*args, **more):
            return original(*args, **more)

    return run


def _role(agent: Any) -> str:
    """An agent's role as the user wrote it, with the placeholders that a crew's inputs fill."""
    return " ".join((getattr(agent, "_original_role", None) or agent.role).split())


@contextmanager
def _agent(agent: Any, *_: Any, **__: Any) -> Iterator[None]:
    with scopes.inside("agent", _role(agent), current_call_id.get()):
        yield


@contextmanager
def _task(task: Any, agent: Any = None, *_: Any, **__: Any) -> Iterator[None]:
    """A task's own calls, which check and convert what the agent said, are the agent's."""
    call, agent = current_call_id.get(), agent or task.agent
    with scopes.inside("agent", task.name or "", call), scopes.inside("agent", _role(agent) if agent else "", call):
        yield


@contextmanager
def _flow(flow: Any, method_name: Any, *_: Any, **__: Any) -> Iterator[None]:
    """A method of a flow. An agent is run by a flow too, which has no name; of CrewAI's other flows the methods have none."""
    call, kind = current_call_id.get(), type(flow)
    of_crewai = kind.__module__.startswith("crewai.")
    name = "" if isinstance(flow, AgentExecutor) else flow.name or kind.__name__
    with scopes.inside("agent", name, call), scopes.inside("agent", "" if of_crewai else str(method_name), call):
        yield


@contextmanager
def _native_tool(*args: Any, **more: Any) -> Iterator[None]:
    """A native tool call. Which argument it is differs; an id that CrewAI has made up for it is none of the model's."""
    name, call_id = more.get("func_name", ""), more.get("call_id", "")
    if not name and (info := extract_tool_call_info(args[-1])):
        call_id, name, _ = info
        call_id = "" if call_id == f"call_{id(args[-1])}" else call_id
    with _use(sanitize_tool_name(name), call_id):
        yield


@contextmanager
def _text_tool(usage: Any, calling: Any, *_: Any, **__: Any) -> Iterator[None]:
    """A tool call in the form of a text, which CrewAI carries out again where the tool raises."""
    here, name = scopes.here(), getattr(calling, "tool_name", "")
    again = here is not None and isinstance(here.subject, ToolRequest) and here.subject.source is usage
    if again or not name:
        yield
        return
    with _use(sanitize_tool_name(name), source=usage):
        yield


@contextmanager
def _use(name: str, call_id: str = "", source: object = None) -> Iterator[None]:
    use = ToolRequest(name, call_id, caller_now(), current_call_id.get(), source)
    try:
        with scopes.inside("tool", name, use):
            yield
    finally:
        use.report()


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def emit(bus: Any, source: Any, event: Any, *args: Any, **more: Any) -> Any:
        if is_end(event):
            here = scopes.here()
            if isinstance(source, BaseLLM):
                hear_of_model(event, caller_now())
            elif here is not None and isinstance(here.subject, ToolRequest):
                here.subject.hear(event)
        return original(bus, source, event, *args, **more)

    return emit
