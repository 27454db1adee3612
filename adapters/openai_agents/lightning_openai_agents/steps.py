"""What the SDK's spans tell: who runs inside whom, and how each tool run ended.

The invariant: a step is known as long as its span is open, and keeps nothing alive but the steps around it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning
from agents.tracing import Span, Trace, TracingProcessor, gen_span_id, get_current_span
from lightning.instrument import Installations, ask, component_path
from lightning.instrument import emit as to_rollout

from lightning_openai_agents.outcomes import told_by_run, watching


def _attach() -> Callable[[], None]:
    from lightning_openai_agents.provider import attach  # which keeps steps

    return attach()


installations = Installations(_attach, otherwise=to_rollout)
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
