"""The meaning of AutoGen's spans: `invoke_agent` and `execute_tool` of agents and tools, `process` of its runtimes' agents. And
what spans lack: agents whose `on_messages` or `on_messages_stream` is called directly have no span, and the arguments and
results of tools are in the event log `autogen_core.events`.

The invariant: only open spans are known here, so an ended agent makes no calls. The name of an agent without a span is known
while its method runs, and for a stream only while its next item is made. The methods do what they did, the last undo puts the
original ones back, and the log's handlers get the same records as without us.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

import lightning
from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import ToolCallEvent
from lightning.instrument import ReplacedMethods, ask
from lightning.instrument import emit as report
from lightning_otel import attributes as names
from lightning_otel.processor import SpanReporter
from lightning_otel.spans import OpenSpans, key
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

open_spans = OpenSpans("AutoGen's agents")
replaced = ReplacedMethods()


class Direct(NamedTuple):
    """A call of an agent without a span of its own."""

    around: tuple[int, int]
    """The span in which the call was made: trace and span id."""
    path: tuple[str, ...]
    """The names from the outermost to the agent's."""
    span_id: str


direct: ContextVar[Direct | None] = ContextVar("lightning_autogen_direct", default=None)


LEVEL = logging.INFO - 1
"""A level that lets AutoGen's events (INFO) pass and that no user would set: if the logger has another level, the user has set
it since."""

Pending = tuple[lightning.ToolEvent, Callable[[lightning.ToolEvent], None]]
_pending: ContextVar[list[Pending] | None] = ContextVar("lightning_autogen_pending", default=None)
_log = logging.getLogger(EVENT_LOGGER_NAME)


class Results(logging.Filter):
    """Sees the log's records before its handlers do."""

    _before = logging.NOTSET

    def start(self) -> None:
        """Start listening. Idempotent."""
        if self not in _log.filters:
            self._before = _log.level
            _log.setLevel(LEVEL)
            _log.addFilter(self)

    def stop(self) -> None:
        """Stop listening, and restore the log."""
        _log.removeFilter(self)
        if _log.level == LEVEL:
            _log.setLevel(self._before)

    def complete(self, event: lightning.ToolEvent, emit: Callable[[lightning.ToolEvent], None]) -> None:
        """Report the event of a tool that has just returned, with arguments and output if AutoGen logs them.

        AutoGen logs right after the tool's span has closed, without an await between. Tools of MCP servers are not logged, and
        their spans close alike whether the tool succeeded or failed, so their status is unknown.
        """
        if self not in _log.filters or not _log.isEnabledFor(logging.INFO):
            emit(event)
            return
        pending: list[Pending] = [(event, emit)]
        _pending.set(pending)
        asyncio.get_running_loop().call_soon(_emit, pending)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the log would have this record without us."""
        if isinstance(record.msg, ToolCallEvent):
            _emit(_pending.get() or [], record.msg)
        if _log.level != LEVEL:
            return True
        above = _log.parent.getEffectiveLevel() if _log.parent else logging.WARNING
        return record.levelno >= (self._before or above)


def _emit(pending: list[Pending], logged: ToolCallEvent | None = None) -> None:
    if pending:
        event, emit = pending.pop()
        if logged is None:
            emit(replace(event, status="unknown"))
        else:
            emit(replace(event, arguments=logged.kwargs["arguments"], output=logged.kwargs["result"]))


results = Results()


class AutoGenReporter(SpanReporter):
    """Reports the tool runs in AutoGen's spans."""

    spans = open_spans

    def report(self, span: ReadableSpan) -> None:
        """Report the tool run of an ended span, if it is one of AutoGen's tools."""
        attributes = span.attributes or {}
        if not _is_autogen(span) or attributes.get(names.OPERATION) != names.EXECUTE_TOOL:
            return
        failed = span.status.status_code is trace.StatusCode.ERROR
        # AutoGen marks the span of a tool that raises; that of a cancelled one only closes while the stack unwinds.
        cancelled = isinstance(sys.exception(), (asyncio.CancelledError, GeneratorExit))
        event = lightning.ToolEvent(
            name=str(attributes.get(names.TOOL_NAME, "")),
            status="error" if failed else "unknown" if cancelled else "ok",
            call_id=str(attributes.get(names.TOOL_CALL_ID, "")),
            error=span.status.description or "",
            caller=caller_of(span.parent),
        )
        if event.status == "ok":
            results.complete(event, self.emit)
        else:
            self.emit(event)


class LightningHandler(AutoGenReporter):
    """Names AutoGen's agents and reports their tools where the adapter is not installed or is disabled.

    Add it to a provider: `provider.add_span_processor(LightningHandler())`. Beside the installed adapter it reports nothing
    twice. `emit` receives the tool runs; by default they go to the rollout that the tool ran for.
    """

    def __init__(self, emit: Callable[[lightning.ToolEvent], None] = report) -> None:
        super().__init__(emit)
        ask(caller_here)


def caller_here() -> lightning.Caller | None:
    """Return the caller in this task."""
    return caller_of(trace.get_current_span().get_span_context())


def caller_of(context: trace.SpanContext | None) -> lightning.Caller | None:
    """Return the caller of calls inside a span; None without an agent around it, or when the innermost agent is not
    AutoGen's."""
    open_spans.check_sampled(context)
    agent, call, parent, path = "", "", "", list[str]()
    known = direct.get()
    while known is None or key(context) != known.around:
        span = open_spans.of(context)
        if context is None or span is None:
            known = None
            break
        kind, name = _named(span)
        if not kind and not path and not call:  # of whoever instruments the client: AutoGen has none for model calls
            call = trace.format_span_id(context.span_id)
        if kind == "agent" and not agent:
            if not _is_autogen(span):
                return None  # another framework's agent, inside a tool
            agent, parent = name, trace.format_span_id(context.span_id)
        if name and path[-1:] != [name]:
            path.append(name)
        context = span.parent
    if known is not None:  # an agent that was called without a span
        agent, parent = agent or known.path[-1], parent or known.span_id
        path += [name for name in reversed(known.path) if path[-1:] != [name]]
    return lightning.Caller(agent, tuple(reversed(path)), call, parent, "autogen") if agent else None


def _named(span: ReadableSpan) -> tuple[str, str]:
    """Return (`agent` or `tool`, its name) of a span; two empty strings for any other span."""
    attributes = span.attributes or {}
    match attributes.get(names.OPERATION):
        case names.INVOKE_AGENT:
            return "agent", str(attributes.get(names.AGENT_NAME, ""))
        case names.EXECUTE_TOOL:
            return "tool", str(attributes.get(names.TOOL_NAME, ""))
    if attributes.get("messaging.operation") == "process" and _is_autogen(span):
        # `writer` of `writer_<team's uuid>.(<key>)-A`: an agent of a runtime, such as the one that picks a team's speaker
        destination = str(attributes.get("messaging.destination", ""))
        return "agent", re.sub(r"(_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\.\(.*\)-A$", "", destination)
    return "", ""


def _is_autogen(span: ReadableSpan) -> bool:
    scope = span.instrumentation_scope
    return scope is not None and scope.name.startswith("autogen")


def watch_agents(module: ModuleType) -> None:
    """Wrap the methods of a module's `BaseChatAgent` and its subclasses, present and later."""
    replaced.replace(module.BaseChatAgent, "__init__", _init)
    kinds = [module.BaseChatAgent]
    while kinds:
        kind = kinds.pop()
        _watch_kind(kind)
        kinds += kind.__subclasses__()


def _watch_kind(kind: type) -> None:
    for name, instead in (("on_messages", _on_messages), ("on_messages_stream", _on_messages_stream)):
        if callable(vars(kind).get(name)):
            replaced.replace(kind, name, instead)


def _init(original: Callable[..., None], agent: Any, /, *args: Any, **more: Any) -> None:
    for kind in type(agent).__mro__:
        _watch_kind(kind)
    original(agent, *args, **more)


@contextmanager
def _inside(known: Direct | None) -> Iterator[None]:
    token = direct.set(known)
    try:
        yield
    finally:
        direct.reset(token)


def _direct_call(agent: Any) -> Direct | None:
    """Return the record for a call of an agent; no new one where its span, or an outer call of it, says the same."""
    caller, here = caller_here(), trace.get_current_span().get_span_context()
    path = caller.path if caller else ()
    if path[-1:] == (agent.name,):
        return direct.get()
    return Direct((here.trace_id, here.span_id), (*path, agent.name), uuid4().hex[:16])


async def _on_messages(original: Callable[..., Awaitable[Any]], agent: Any, /, *args: Any, **more: Any) -> Any:
    with _inside(_direct_call(agent)):
        return await original(agent, *args, **more)


async def _on_messages_stream(
    original: Callable[..., AsyncGenerator[Any, None]], agent: Any, /, *args: Any, **more: Any
) -> AsyncGenerator[Any, None]:
    known = _direct_call(agent)
    stream = original(agent, *args, **more)
    try:
        while True:
            with _inside(known):
                try:
                    item = await anext(stream)
                except StopAsyncIteration:
                    return
            yield item
    finally:
        await stream.aclose()
