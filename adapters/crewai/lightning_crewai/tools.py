"""What CrewAI's events tell of a tool's run, heard in the thread or task that sends them: the event bus calls its handlers in
threads of its own, where nobody knows who is calling.

The invariant: one request of the model's for a tool is one `ToolEvent`, however often CrewAI runs the tool for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning
from crewai.events import ToolUsageErrorEvent, ToolUsageFinishedEvent
from crewai.tools.tool_failure import ToolFailureReason

BLOCKED = "Tool execution blocked by hook"
"""How the text begins that a tool has returned which a hook of the user's did not let run."""
PLAN = "create_reasoning_plan"
"""The function by which an agent's model answers with a plan; it is no tool of the user's."""


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


def is_end(event: object) -> bool:
    """Whether an event tells how a tool's run has ended."""
    return isinstance(event, ToolUsageFinishedEvent | ToolUsageErrorEvent)


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
