"""The meaning of LlamaIndex's spans: workflows and their steps, agents, tools, models, and the components of query engines; and
which of them is around the code that calls the model.

The invariant: any other span has no name, and what happens in it belongs to the span around it. A step is known as long as its
span is open, and keeps alive only the steps around it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from inspect import BoundArguments
from typing import Any, Literal, NamedTuple

import lightning
from lightning.instrument import ActiveScope, Installations, Scopes
from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, BaseWorkflowAgent, ToolCall, ToolCallResult
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.question_gen.types import BaseQuestionGenerator
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import TransformComponent
from llama_index.core.tools import BaseTool, ToolOutput
from llama_index.core.workflow import Workflow
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.span_handlers import NullSpanHandler

COMPONENTS = (
    BaseQueryEngine,
    BaseChatEngine,
    BaseRetriever,
    BaseSynthesizer,
    BaseSelector,
    BaseQuestionGenerator,
    BaseQueryTransform,
    BaseNodePostprocessor,
    TransformComponent,
)
"""Parts of a query engine, a chat engine or an ingestion that may call a model."""
UUID = 37
"""Length of the part of a span's id after the name of its function."""


class SpanScope(ActiveScope):
    """One span: the work of an agent or a component, of a tool or of a model."""

    def __init__(
        self, kind: Literal["agent", "tool", "call"], name: str = "", around: ActiveScope | None = None
    ) -> None:
        super().__init__(kind, name, None, around)
        self.tool: lightning.ToolEvent | None = None
        """The tool's event, to be reported at the span's end if the tool has begun: a tool that the model invented never
        begins."""
        self.begun = False
        self.before: ActiveScope | None = None
        """The innermost scope of the context when the span began."""
        self.inside: tuple[LazyResult, ...] = ()
        """The lazy results that were making an item when the span began: this span is part of that work."""


class WorkflowScope(SpanScope):
    """A run of a workflow. An agent is one, and so is a team of agents that hand over to each other."""

    def __init__(self, name: str, around: ActiveScope | None, *, of_agents: bool) -> None:
        super().__init__("agent", name, around)
        self.of_agents = of_agents
        """Whether its steps are internal steps of agents."""
        self.agent = ""
        """The agent whose turn it is."""
        self.asked: frozenset[str] = frozenset()
        """The ids of the model's tool calls; those of a ReAct agent are made up after its answer."""


class LazyResult(NamedTuple):
    """A generator that a span returned: it calls the model when an item is wanted, after the span has ended."""

    items: weakref.ref[Any]
    step: SpanScope

    def is_made(self) -> bool:
        """Whether an item is being made now."""
        items = self.items()
        return bool(getattr(items, "gi_running", False) or getattr(items, "ag_running", False))

    def is_over(self) -> bool:
        """Whether no more items will come."""
        items = self.items()
        return getattr(items, "gi_frame", None) is None and getattr(items, "ag_frame", None) is None


_lazy_results: ContextVar[tuple[LazyResult, ...]] = ContextVar("lightning_llama_index_lazy", default=())
"""The lazy results of this context, the newest first."""


class SpanScopes(Scopes):
    """The open steps, by the ids of their spans."""

    def __init__(self) -> None:
        super().__init__("llama-index")
        self.open: weakref.WeakValueDictionary[str, SpanScope] = weakref.WeakValueDictionary()

    def begin(self, span_id: str, step: SpanScope) -> None:
        """Note that a span was entered in this context."""
        self.open[span_id] = step
        step.before, step.inside = self._innermost.get(), tuple(_made())
        self._innermost.set(step)

    def end(self, span_id: str, result: object = None) -> SpanScope | None:
        """Note that a span has ended, maybe in another context than it began in, and return its step."""
        step = self.open.pop(span_id, None)
        if step is not None:
            step.is_open = False
            if self._innermost.get() is step:
                self._innermost.set(step.before)
            if isinstance(result, Generator | AsyncGenerator):
                others = tuple(lazy for lazy in _lazy_results.get() if not lazy.is_over())
                _lazy_results.set((LazyResult(weakref.ref(result), step), *others))
        return step

    def here(self) -> ActiveScope | None:
        """The innermost step that this code runs in; it may be an ended one whose result is making an item now."""
        inner = super().here()
        inside = inner.inside if isinstance(inner, SpanScope) else ()
        named = next((scope for scope in inner.outwards() if scope.name), None) if inner else None
        for lazy in _made():
            if lazy not in inside and (named is None or named in lazy.step.outwards()):
                return lazy.step
        return inner


def _made() -> Iterator[LazyResult]:
    """Yield the lazy results that are making an item in this context now, the newest first."""
    return (lazy for lazy in _lazy_results.get() if lazy.is_made())


steps = SpanScopes()


class SpanListener(NullSpanHandler):  # type: ignore[misc]  # LlamaIndex is not there when types are checked
    """Hears of every span, in the thread or task in which it happens. LlamaIndex drops exceptions of its methods."""

    def span_enter(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, parent_id: Any = None, **more: Any
    ) -> None:
        """Begin the step of a span."""
        steps.begin(id_, _step(id_[:-UUID].rpartition(".")[2], instance, bound_args.arguments))

    def span_exit(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **more: Any
    ) -> None:
        """End the step of a span that ended without an exception. A workflow's step ends so, too, when it is cancelled or waits
        for a human."""
        step = steps.end(id_, result)
        if step is not None and isinstance(step.around, WorkflowScope) and isinstance(result, AgentOutput):
            step.around.asked = _asked(result.response)
        if step is not None and step.begun and step.tool is not None:
            _report(step.tool, *_outcome(result))

    def span_drop(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, err: BaseException | None = None, **more: Any
    ) -> None:
        """End the step of a span that ended with an exception."""
        step = steps.end(id_)
        if step is not None and step.begun and step.tool is not None:
            cancelled = isinstance(err, asyncio.CancelledError)
            _report(step.tool, "unknown" if cancelled else "error", "", "" if cancelled else repr(err))


def _report(tool: lightning.ToolEvent, status: str, output: str, error: str) -> None:
    installations.tell(replace(tool, status=status, output=output, error=error))


def _outcome(result: Any) -> tuple[str, str, str]:
    """Return status, output and error of a tool's run from its result. Without a result its step was cancelled, or waits for a
    human."""
    output = result.tool_output if isinstance(result, ToolCallResult) else result
    if output is None:
        return "unknown", "", ""
    if not isinstance(output, ToolOutput):
        return "ok", str(output), ""
    if output.is_error:
        return "error", "", repr(output.exception) if output.exception else output.content
    return "ok", output.content, ""


def _step(function: str, instance: Any, arguments: Mapping[str, Any]) -> SpanScope:
    """Make the step of a span, by the function that runs in it and the object whose method that is."""
    around = steps.here()
    if instance is None and isinstance(around, WorkflowScope):
        return _workflow_step(function, around, arguments.get("ev"))
    if isinstance(instance, Workflow) and function == "run":
        if isinstance(instance, BaseWorkflowAgent):
            return WorkflowScope(instance.name, around, of_agents=True)
        team = isinstance(instance, AgentWorkflow)
        return WorkflowScope("" if team else _name_of(instance), around, of_agents=team)
    if isinstance(instance, BaseLLM):
        return SpanScope("call", around=around)
    if isinstance(instance, BaseTool):
        return _tool(instance.metadata.get_name(), around, arguments)
    return SpanScope("agent", type(instance).__name__ if isinstance(instance, COMPONENTS) else "", around)


def _workflow_step(function: str, run: WorkflowScope, event: Any) -> SpanScope:
    if not run.of_agents:
        return SpanScope("agent", function, run)
    run.agent = getattr(event, "current_agent_name", run.agent)
    agent = SpanScope("agent", run.agent, run)
    if not isinstance(event, ToolCall):
        return agent
    agent.is_open = False  # it is only part of the path: the span is the tool's
    step = SpanScope("tool", event.tool_name, agent)
    call_id = event.tool_id if event.tool_id in run.asked else ""
    step.tool = lightning.ToolEvent(event.tool_name, "unknown", call_id, event.tool_kwargs, caller=steps.caller(agent))
    return step


def _tool(name: str, around: ActiveScope | None, arguments: Mapping[str, Any]) -> SpanScope:
    """Make the step of a tool's function. A tool may wrap another one, and an agent's own step may call it: then no second
    event is made."""
    step = SpanScope("tool", name, around)
    named = next((scope for scope in around.outwards() if scope.name), None) if around else None
    if isinstance(named, SpanScope) and (named.kind, named.name) == ("tool", name):
        named.begun = True
        return step
    given = {**arguments, **arguments.get("kwargs", {})}
    given = {key: value for key, value in given.items() if key not in ("args", "kwargs")}
    caller = steps.caller(around) if around else None
    step.tool, step.begun = lightning.ToolEvent(name, "unknown", arguments=given, caller=caller), True
    return step


def _name_of(workflow: Any) -> str:
    """Return the name that a workflow was given, or its class's name without modules and outer functions."""
    name, kind = str(workflow.workflow_name), type(workflow)
    return kind.__name__ if name == f"{kind.__module__}.{kind.__qualname__}" else name


def _asked(message: Any) -> frozenset[str]:
    """Return the ids of the tool calls in a model's message."""
    blocks = [getattr(block, "tool_call_id", None) for block in message.blocks]
    calls = message.additional_kwargs.get("tool_calls") or ()
    older = [call.get("id") if isinstance(call, dict) else getattr(call, "id", None) for call in calls]
    return frozenset(found for found in (*blocks, *older) if found)


_handler = SpanListener()


def _attach() -> Callable[[], None]:
    root_dispatcher.add_span_handler(_handler)

    def detach() -> None:
        if _handler in root_dispatcher.span_handlers:  # else the user has set a list of his own since
            root_dispatcher.span_handlers.remove(_handler)

    return detach


installations = Installations(_attach)
