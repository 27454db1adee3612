"""The methods of CrewAI that run agents, tasks, flows and tools, wrapped while the adapter is installed; CrewAI's telemetry is
off meanwhile.

The invariant: a wrapped method does what it did, with the same arguments. One request of the model for a tool is one
`ToolEvent`, however often CrewAI runs the tool for it. CrewAI's events are heard in the thread or task that sends them, because
the event bus calls its handlers in other threads, where the caller is not known.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning
from crewai import Agent, BaseLLM, Flow, Task
from crewai.agents import step_executor
from crewai.events import ToolUsageErrorEvent, ToolUsageFinishedEvent, crewai_event_bus
from crewai.llms.base_llm import _current_call_id as current_call_id
from crewai.tools.tool_failure import ToolFailureReason
from crewai.tools.tool_usage import ToolUsage
from crewai.utilities.agent_utils import extract_tool_call_info
from crewai.utilities.string_utils import sanitize_tool_name
from lightning.errors import PluginError
from lightning.instrument import Installations, ReplacedMethods, Scopes

EXECUTOR = Agent.model_fields["executor_class"].default
"""The class of the flow that runs an agent; its module differs between releases."""
QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}
"""Variables that stop CrewAI from reporting to its makers, and from asking at its first run whether traces may be shared."""
OLD = (
    ("crewai.agents.crew_agent_executor", "CrewAgentExecutor", "_execute_single_native_tool_call"),
    ("crewai.lite_agent", "LiteAgent", "kickoff"),
)
"""Methods that later releases lack or will lack: module, class and method."""
BLOCKED = "Tool execution blocked by hook"
"""Beginning of a tool's output when a hook of the user blocked it."""
PLAN = "create_reasoning_plan"
"""The function by which an agent's model answers with a plan; it is no tool of the user."""

scopes = Scopes("crewai")
"""The scopes of CrewAI. An agent's subject is the model call that it runs in, if any; a tool's subject is its `ToolRequest`."""


replaced = ReplacedMethods()


def _attach() -> Callable[[], None]:
    """Wrap CrewAI's methods and switch its telemetry off; return the undo. Raises `PluginError` where this release lacks a
    method."""
    try:
        for name in ("execute_task", "aexecute_task", "kickoff", "kickoff_async"):
            _replace(Agent, name, _agent)
        for name in ("_execute_core", "_aexecute_core"):
            _replace(Task, name, _task)
        for name in ("use", "ause"):
            _replace(ToolUsage, name, _text_tool)
        _replace(Flow, "_execute_method", _flow)
        _replace(EXECUTOR, "_execute_single_native_tool_call", _native_tool)
        _replace(step_executor, "execute_single_native_tool_call", _native_tool)
        for module, kind, name in OLD:
            with contextlib.suppress(ImportError):
                owner = getattr(importlib.import_module(module), kind)
                _replace(owner, name, _agent if name == "kickoff" else _native_tool)
    except PluginError:
        replaced.put_back()
        raise
    replaced.replace(type(crewai_event_bus), "emit", _heard)
    ours = [name for name in QUIET if name not in os.environ]  # what the user has set stays
    os.environ.update({name: QUIET[name] for name in ours})

    def detach() -> None:
        replaced.put_back()
        for name in ours:
            os.environ.pop(name, None)

    return detach


def _replace(owner: Any, name: str, enter: Callable[..., Any]) -> None:
    places = owner.__mro__ if isinstance(owner, type) else (owner,)
    found = next((place for place in places if name in vars(place)), None)
    if found is None:
        version = importlib.metadata.version("crewai")
        raise PluginError(
            f"crewai {version} has no {owner.__name__}.{name}, which this adapter watches. Run: pip install "
            "'crewai==1.15.30', or a newer lightning"
        )
    inside = _inside_async if inspect.iscoroutinefunction(getattr(found, name)) else _inside
    replaced.replace(found, name, functools.partial(inside, enter))


installations = Installations(_attach)


def caller_now() -> lightning.Caller | None:
    """Return the caller of a request from this thread or task; None outside CrewAI's agents."""
    scope, call = scopes.here(), current_call_id.get()
    caller = scopes.caller(scope) if scope else None
    if scope is None or caller is None or not call or call == _call_around(scope.subject):
        return caller
    return replace(caller, span_id=call, parent_id=scope.id)


def _call_around(subject: object) -> object:
    return subject.call if isinstance(subject, ToolRequest) else subject


def _inside(enter: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    """Run the method in the scopes that `enter` opens for its arguments."""
    with enter(*args, **more):
        return original(*args, **more)


async def _inside_async(enter: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    with enter(*args, **more):
        return await original(*args, **more)


def _role(agent: Any) -> str:
    """Return an agent's role as the user wrote it, before the crew's inputs fill its placeholders."""
    return " ".join((getattr(agent, "_original_role", None) or agent.role).split())


@contextmanager
def _agent(agent: Any, *_: Any, **__: Any) -> Iterator[None]:
    with scopes.inside("agent", _role(agent), current_call_id.get()):
        yield


@contextmanager
def _task(task: Any, agent: Any = None, *_: Any, **__: Any) -> Iterator[None]:
    """Open the scopes of a task and its agent: calls that check and convert the agent's answer belong to the agent."""
    call, agent = current_call_id.get(), agent or task.agent
    with scopes.inside("agent", task.name or "", call), scopes.inside("agent", _role(agent) if agent else "", call):
        yield


@contextmanager
def _flow(flow: Any, method_name: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Open the scopes of a flow and its method. The flow that runs an agent has no name, and methods of CrewAI's own flows have
    none."""
    call, kind = current_call_id.get(), type(flow)
    of_crewai = kind.__module__.startswith("crewai.")
    name = "" if isinstance(flow, EXECUTOR) else flow.name or kind.__name__
    with scopes.inside("agent", name, call), scopes.inside("agent", "" if of_crewai else str(method_name), call):
        yield


@contextmanager
def _native_tool(*args: Any, **more: Any) -> Iterator[None]:
    """Open the scope of a native tool call. Releases pass the call as different arguments; an id that CrewAI made up is
    dropped."""
    name, call_id = more.get("func_name", ""), more.get("call_id", "")
    if not name and (info := extract_tool_call_info(args[-1])):
        call_id, name, _ = info
        call_id = "" if call_id == f"call_{id(args[-1])}" else call_id
    with _use(sanitize_tool_name(name), call_id):
        yield


@contextmanager
def _text_tool(usage: Any, calling: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Open the scope of a tool call in text form. CrewAI repeats the call when the tool raises; the repetition has no new
    scope."""
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
        _report(use)


def _report(use: ToolRequest) -> None:
    if use.run is not None:
        installations.tell(use.run)


def _heard(original: Callable[..., Any], bus: Any, /, source: Any, event: Any, *args: Any, **more: Any) -> Any:
    if isinstance(event, ToolUsageFinishedEvent | ToolUsageErrorEvent):  # events of a tool's end
        here = scopes.here()
        if isinstance(source, BaseLLM):  # the LLM itself ran one of the functions it was given
            use = ToolRequest(sanitize_tool_name(event.tool_name), "", caller_now())
            use.hear(event)
            _report(use)
        elif here is not None and isinstance(here.subject, ToolRequest):
            here.subject.hear(event)
    return original(bus, source, event, *args, **more)


class ToolRequest:
    """A request of the model for a tool, while it is carried out."""

    def __init__(
        self,
        name: str,
        call_id: str,
        caller: lightning.Caller | None,
        call: str | None = None,
        source: object = None,
    ) -> None:
        self.call, self.source = call, source
        """The model call that it is made in (None: none), and CrewAI's object that carries it out."""
        self._event = lightning.ToolEvent(name, "unknown", call_id, caller=caller)
        self._heard = False

    def hear(self, event: Any) -> None:
        """Take in the end of a run of the tool; the last run counts."""
        failure = getattr(event, "failure", None)
        if failure is not None and failure.reason is ToolFailureReason.UNKNOWN_TOOL:
            return  # the model invented the tool: nothing ran
        self._event, self._heard = _ended(self._event, event, failure), True

    @property
    def run(self) -> lightning.ToolEvent | None:
        """The event to report after the request was carried out; None for nothing."""
        return self._event if self._heard and self._event.name != PLAN else None


def _ended(use: lightning.ToolEvent, event: Any, failure: Any) -> lightning.ToolEvent:
    told = replace(use, arguments=event.tool_args)
    if isinstance(event, ToolUsageErrorEvent):
        error = event.error
        return replace(told, status="error", error=repr(error) if isinstance(error, Exception) else str(error))
    if failure is not None:
        spent = failure.reason is ToolFailureReason.USAGE_LIMIT
        return replace(told, status="blocked" if spent else "error", error=failure.message)
    output = str(event.output)
    if output.startswith(BLOCKED):
        return replace(told, status="blocked", error=output)
    return replace(told, status="ok", output=output)
