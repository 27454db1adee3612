"""The methods of CrewAI that run agents, tasks, flows and tools, replaced while the adapter is installed, and its telemetry,
which is off meanwhile.

The invariant: a method does what it did, with the arguments that it got. One request of the model's for a tool is one
`ToolEvent`, however often CrewAI runs the tool for it. CrewAI's events are heard in the thread or task that sends them: the
event bus calls its handlers in threads of its own, where nobody knows who is calling.
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
"""What CrewAI looks at before it reports to its makers, and before it asks at its first run whether traces may be shared."""
OLD = (
    ("crewai.agents.crew_agent_executor", "CrewAgentExecutor", "_execute_single_native_tool_call"),
    ("crewai.lite_agent", "LiteAgent", "kickoff"),
)
"""What later releases have no more, or will not have: module, class and method."""
BLOCKED = "Tool execution blocked by hook"
"""How the text begins that a tool has returned which a hook of the user's did not let run."""
PLAN = "create_reasoning_plan"
"""The function by which an agent's model answers with a plan; it is no tool of the user's."""

scopes = Scopes("crewai")
"""The subject of an agent's scope is the model call that it runs in, if any; that of a tool's is its `ToolRequest`."""


replaced = ReplacedMethods()


def _attach() -> Callable[[], None]:
    """Raises `PluginError` where this release of CrewAI lacks a method."""
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
    """Who sends a request from this thread or task."""
    scope, call = scopes.here(), current_call_id.get()
    caller = scopes.caller(scope) if scope else None
    if scope is None or caller is None or not call or call == _call_around(scope.subject):
        return caller
    return replace(caller, span_id=call, parent_id=scope.id)


def _call_around(subject: object) -> object:
    return subject.call if isinstance(subject, ToolRequest) else subject


def _inside(enter: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    """The method, run in the scopes that `enter` opens for its arguments."""
    with enter(*args, **more):
        return original(*args, **more)


async def _inside_async(enter: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    with enter(*args, **more):
        return await original(*args, **more)


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
    name = "" if isinstance(flow, EXECUTOR) else flow.name or kind.__name__
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
        _report(use)


def _report(use: ToolRequest) -> None:
    if use.run is not None:
        installations.tell(use.run)


def _heard(original: Callable[..., Any], bus: Any, /, source: Any, event: Any, *args: Any, **more: Any) -> Any:
    if isinstance(event, ToolUsageFinishedEvent | ToolUsageErrorEvent):  # they tell how a tool's run has ended
        here = scopes.here()
        if isinstance(source, BaseLLM):  # it has made the run itself, of the functions that it was given
            use = ToolRequest(sanitize_tool_name(event.tool_name), "", caller_now())
            use.hear(event)
            _report(use)
        elif here is not None and isinstance(here.subject, ToolRequest):
            here.subject.hear(event)
    return original(bus, source, event, *args, **more)


class ToolRequest:
    """A request of the model's for a tool, while it is carried out."""

    def __init__(
        self,
        name: str,
        call_id: str,
        caller: lightning.Caller | None,
        call: str | None = None,
        source: object = None,
    ) -> None:
        self.call, self.source = call, source
        """The model call that it is made in, if any, and CrewAI's object that carries it out."""
        self._event = lightning.ToolEvent(name, "unknown", call_id, caller=caller)
        self._heard = False

    def hear(self, event: Any) -> None:
        """A run of the tool has ended; the last one counts."""
        failure = getattr(event, "failure", None)
        if failure is not None and failure.reason is ToolFailureReason.UNKNOWN_TOOL:
            return  # the model has invented it: nothing ran
        self._event, self._heard = _ended(self._event, event, failure), True

    @property
    def run(self) -> lightning.ToolEvent | None:
        """What is to be reported once it has been carried out, if anything is."""
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
