"""Where spans stand in the line of the gateway: what they say of an attempt's tools and agents is in its outcome.

The invariant: a span is evidence beside the gateway's record, never instead of it. What spans add to a rollout is settled when
its attempt ends and is stored with the outcome, so nothing that arrives later changes what was trained.
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
"""Characters kept of which tools a request offers."""


class TracesStage(CallStage):
    """Keeps a span of each tool that the model has invented, and adds to each outcome what spans know of it."""

    api, after, before = 1, ("branches", "history"), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._store = parts.store

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Keep the spans of tools that are none, now that there is a call that they belong to."""
        if transitions[0].status.answered and (invented := invented_tools(call)):
            await append_spans(self._store, invented)

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """Add the tools that ran and the callers that only spans know."""
        return with_spans(outcome, await spans(self._store, rollout.id, rollout.attempt), calls)


def invented_tools(call: Call) -> list[Span]:
    """The tools that an answer calls and its request does not offer, each as the span of a run that failed: no framework tells
    of a tool that it does not know."""
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
                started_at=now + place * 1e-6,  # in their order
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
