"""What the SDK's spans tell: who runs inside whom, and how each tool run ended. A provider that stands before the SDK's keeps a
`Step` beside each span.

The invariant: a step is known as long as its span is open, and keeps nothing alive but the steps around it. The real provider
makes every trace and span, with the arguments it would have got, and its processors see them as ever. A span that is switched
off stays so; the step beside it is lightning's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import replace
from typing import Any, Self, cast

import lightning
from agents.tracing import (
    Span,
    Trace,
    TraceProvider,
    TracingProcessor,
    gen_span_id,
    get_current_span,
    get_trace_provider,
    set_trace_provider,
)
from agents.tracing.processors import default_exporter, default_processor
from lightning.instrument import Installations, ask, component_path, hold_slots
from lightning.instrument import emit as to_rollout

from lightning_openai_agents.outcomes import told_by_run, watching

RUN_TOOL = ("_invoke_function_tool_with_metadata", "invoke_function_tool")
"""The functions that run a tool; which of them the SDK calls depends on its version."""
NAMED = ("agent", "function", "guardrail")
"""Spans whose names stand in a caller's path."""
MODEL = ("generation", "response")
"""Spans of model calls."""


class Step:
    """What happens inside one span; `path` runs from the outermost name to its own."""

    def __init__(self, data: Any, parent: Step | None, span_id: str) -> None:
        self.data, self.parent, self.open = data, parent, True
        self.span_id = gen_span_id() if span_id == "no-op" else span_id
        self.components = component_path()
        self.named: bool = data.type in NAMED or (parent is not None and parent.named)
        self.path = parent.path_here() if parent else self.components
        if data.type in NAMED and self.path[-1:] != (data.name,):
            self.path += (data.name,)
        self.context: Any = None
        """The SDK's `ToolContext` of a tool that runs."""
        self.outcome: tuple[str, str] | None = None
        """Status and error of a tool run, where its span does not say them."""
        self.doubtful: list[lightning.ToolEvent] = []
        self.reports = data.type == "function" and not told_by_run(self)
        if data.type in MODEL and (agent := self.agent()):
            agent.settle("ok")

    def agent(self) -> Step | None:
        """The agent whose step this is; None inside a tool or guardrail that is no agent."""
        step = self.parent
        while step is not None and step.data.type not in NAMED:
            step = step.parent
        return step if step is not None and step.data.type == "agent" else None

    def settle(self, status: str) -> None:
        """Report an agent's tool runs that showed no output.

        The span of a tool that waits for an approval looks like that of one that returned None: the agent goes on to its next
        model call only if all of a turn's tools have run.
        """
        settled, self.doubtful = self.doubtful, []
        for event in settled:
            self.report(replace(event, status=status))

    def report(self, event: lightning.ToolEvent) -> None:
        """Tell whoever gets the tool events."""
        installations.tell(event)

    def path_here(self) -> tuple[str, ...]:
        """Its path, and behind it the `lightning.component`s entered since it began."""
        now, known = component_path(), len(self.components)
        return self.path + (now[known:] if now[:known] == self.components else ())

    def caller(self) -> lightning.Caller | None:
        """Who calls from inside it; None outside every agent."""
        if not self.open or not self.named:
            return self.parent.caller() if self.parent else None
        path, around = self.path_here(), self.parent.span_id if self.parent else ""
        call, parent = (self.span_id, around) if self.data.type in MODEL else ("", self.span_id)
        return lightning.Caller(path[-1], path, call, parent, "openai-agents")

    def close(self, error: Any) -> None:
        """Its span has ended: keep what the model asked for, report a tool's run; a second time: nothing."""
        data, was_open, self.open = self.data, self.open, False
        if was_open and self.reports:
            event, agent = self._event(error), self.agent()
            self.context = None
            if event.status == "ok" and data.output is None and agent and agent.open:
                agent.doubtful.append(event)
            else:
                self.report(event)
        elif was_open and data.type == "agent":
            self.settle("unknown")

    def _event(self, error: Any) -> lightning.ToolEvent:
        name, output, context = self.data.name, self.data.output, self.context
        call_id = context.tool_call_id if context else ""
        why = str((error.get("data") or {}).get("error") or error["message"]) if error else ""
        if self.outcome:
            status, why = self.outcome
        elif context and context.is_tool_approved(context.tool_name, call_id) is False:
            status = "blocked"
        else:
            status = "error" if error else "unknown" if _cancelled() else "ok"
        return lightning.ToolEvent(
            name,
            status,
            call_id=call_id,
            arguments=_parsed(self.data.input),
            output="" if output is None else str(output),
            error=why,
            caller=self.parent.caller() if self.parent else None,
            at=time.time(),
        )


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return text


def _cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop here
        return False
    return task is not None and task.cancelling() > 0


_by_hand: dict[str, tuple[str, Step]] = {}
"""The open steps that `LightningProcessor`s know, with their traces, by span id."""


def step_by_hand() -> Step | None:
    """The step of the innermost span here that `LightningProcessor`s know."""
    span = get_current_span()
    return _by_hand.get(span.span_id, ("", None))[1] if span else None


def _caller_by_hand() -> lightning.Caller | None:
    step = step_by_hand()
    return step.caller() if step else None


class LightningProcessor(TracingProcessor):
    """For `add_trace_processor`: names callers and reports tool runs where tracing is enabled.

    Any number of them report a run once, and beside the installed adapter they do nothing. They leave the default exporter
    alone.
    """

    def __init__(self) -> None:
        ask(_caller_by_hand)
        if step_by_hand not in watching.users:
            watching.add(step_by_hand)

    def on_span_start(self, span: Span[Any]) -> None:
        """Its parent, if any, has begun before."""
        if not installations and span.span_id not in _by_hand:
            around = _by_hand.get(span.parent_id or "", ("", None))[1]
            _by_hand[span.span_id] = span.trace_id, Step(span.span_data, around, span.span_id)

    def on_span_end(self, span: Span[Any]) -> None:
        """Report a tool's run."""
        if found := _by_hand.pop(span.span_id, None):
            found[1].close(span.error)

    def on_trace_start(self, trace: Trace) -> None:
        """Nothing to do."""

    def on_trace_end(self, trace: Trace) -> None:
        """Forget spans that nobody ended."""
        for key in [key for key, (trace_id, _) in tuple(_by_hand.items()) if trace_id == trace.trace_id]:
            _by_hand.pop(key, None)

    def shutdown(self) -> None:
        """Nothing to do."""

    def force_flush(self) -> None:
        """Nothing to do."""


_current: ContextVar[WatchedSpan | None] = ContextVar("lightning_openai_agents_span", default=None)


def current_step() -> Step | None:
    """The step of the innermost span that this thread or task has begun."""
    watched = _current.get()
    return watched.step if watched else None


@Span.register
class WatchedSpan:
    """The real span, whose step begins and ends with it."""

    def __init__(self, span: Span[Any], around: WatchedSpan | None) -> None:
        self.span, self.failure = span, span.error
        self.step: Step = Step(span.span_data, around.step if around else None, span.span_id)
        self._token: Token[WatchedSpan | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.span, name)

    def __enter__(self) -> Self:
        self.start(mark_as_current=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self.span.__exit__(*raised)  # type: ignore[no-untyped-call]  # the SDK's
        self._end(True)

    def start(self, mark_as_current: bool = False) -> None:
        """As a span does."""
        self.span.start(mark_as_current)
        if mark_as_current:
            self._token = _current.set(self)

    def finish(self, reset_current: bool = False) -> None:
        """As a span does."""
        self.span.finish(reset_current)
        self._end(reset_current)

    def set_error(self, error: Any) -> None:
        """As a span does; one that is switched off would forget it."""
        self.failure = error
        self.span.set_error(error)

    def _end(self, reset_current: bool) -> None:
        self.step.close(self.failure)
        if reset_current and self._token is not None:
            token, self._token = self._token, None
            with contextlib.suppress(ValueError):  # begun in another task, which sees that the step is closed
                _current.reset(token)


@TraceProvider.register
class Provider:
    """The real provider, whose spans are watched."""

    def __init__(self, real: TraceProvider) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_current_span(self) -> Any:
        """The real one; watched, if it was made here."""
        real, watched = self._real.get_current_span(), _current.get()
        return watched if watched is not None and watched.span is real else real

    def create_span(self, span_data: Any, span_id: Any = None, parent: Any = None, disabled: bool = False) -> Any:
        """The real one, watched."""
        around, inner = (_current.get(), None) if parent is None else (None, parent)
        if isinstance(parent, WatchedSpan):
            around, inner = parent, parent.span
        return WatchedSpan(self._real.create_span(span_data, span_id, inner, disabled), around)


def _attach() -> Callable[[], None]:
    """Stand before the SDK's trace provider from now on; returns the undo."""
    before, undos = get_trace_provider(), contextlib.ExitStack()
    ours = cast("TraceProvider", Provider(before))

    def restore_provider() -> None:
        if get_trace_provider() is ours:  # else the user has set another one since
            set_trace_provider(before)

    undos.callback(restore_provider)
    undos.callback(_silence_default_exporter())
    set_trace_provider(ours)
    undos.callback(watching.add(current_step))
    # Around what counts a tool's timeout, so that waiting for a turn is not the tool's time.
    undos.callback(hold_slots("agents.run_internal.tool_execution", "", RUN_TOOL, _tool_of))
    return undos.close


def _tool_of(*, function_tool: Any, **_: object) -> str:
    return str(function_tool.name)


def _silence_default_exporter() -> Callable[[], None]:
    """It takes nothing in; what it had taken in before waits. Methods are shadowed in the SDK's one instance of each."""
    exporter, processor = cast("Any", default_exporter()), cast("Any", default_processor())
    waiting: list[object] = []
    exporter.export = waiting.extend
    processor.on_trace_start = processor.on_span_end = lambda _: None

    def restore() -> None:
        del exporter.export, processor.on_trace_start, processor.on_span_end
        for item in waiting:
            (processor.on_trace_start if isinstance(item, Trace) else processor.on_span_end)(item)

    return restore


installations = Installations(_attach, otherwise=to_rollout)
