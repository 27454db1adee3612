"""The gateway's stage that adds what spans show about an attempt's tools and agents to its outcome.

The invariant: spans add to the gateway's record and never replace it. What spans add to a rollout is settled when its attempt
ends and is stored with the outcome, so that later spans change nothing that was trained.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.gateway.stages import CallStage
from lightning.redaction import redacted_span
from lightning.types import Outcome, Rollout, Span, Transition

from lightning_otel.attributes import (
    AGENT_NAME,
    ERROR_TYPE,
    EXECUTE_TOOL,
    OPERATION,
    RESPONSE_ID,
    TOOL_ARGUMENTS,
    TOOL_CALL_ID,
    TOOL_NAME,
    UNKNOWN_TOOL,
)
from lightning_otel.traces.derive import with_spans
from lightning_otel.traces.store import append_spans, spans

if TYPE_CHECKING:
    from lightning.gateway.call import Call
    from lightning.gateway.calls import Parts

LONGEST_ERROR = 2000
"""The most characters of an error that lists the offered tools."""


class TracesStage(CallStage):
    """Stores a span for each tool that the model invented, and adds to each outcome what its spans show."""

    api, after, before = 1, ("branches", "history"), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._store = parts.store

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Store the spans of invented tools, now that their call is stored."""
        if transitions[0].status.answered and (invented := invented_tools(call)):
            await append_spans(self._store, invented)

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """Return the outcome with the tool runs and the callers that only spans show."""
        return with_spans(outcome, await spans(self._store, rollout.id, rollout.attempt), calls)


def invented_tools(call: Call) -> list[Span]:
    """Return spans of failed runs for the tools that an answer calls and its request does not offer, since no framework reports
    a tool that it does not know."""
    capture, (rollout, attempt) = call.capture, call.attempt
    called = [tool for _, choice in sorted(capture.choices.items()) for tool in choice.invented]
    if not called:
        return []
    trace = hashlib.sha256(f"{rollout} {attempt}".encode()).hexdigest()[:32]
    offered, now = ", ".join(sorted(capture.offered)), time.time()
    return [
        redacted_span(
            Span(
                rollout,
                attempt,
                trace,
                hashlib.sha256(f"{capture.id} {place}".encode()).hexdigest()[:16],
                name=f"{EXECUTE_TOOL} {tool.name}",
                started_at=now + place * 1e-6,  # keeps their order
                ended_at=now + place * 1e-6,
                status="error",
                error=f"the model called a tool that its request does not offer; it offers {offered}"[:LONGEST_ERROR],
                service="lightning",
                attributes={
                    OPERATION: EXECUTE_TOOL,
                    AGENT_NAME: call.caller.name,
                    RESPONSE_ID: capture.id,
                    TOOL_NAME: tool.name,
                    TOOL_CALL_ID: tool.id,
                    TOOL_ARGUMENTS: tool.arguments,
                    ERROR_TYPE: UNKNOWN_TOOL,
                },
            )
        )
        for place, tool in enumerate(called)
    ]
