"""What the spans of an attempt say about its tools and its agents, added to its outcome.

The invariant: the result depends only on the outcome, the spans and the calls, so it is the same wherever it is computed; and
what the agent's own process reported is never contradicted: spans fill in what nobody had said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import orjson
from lightning.types import UNNAMED, Caller, Json, Outcome, Span, ToolEvent, Transition

from lightning_otel.attributes import (
    AGENT_NAME,
    ERROR_TYPE,
    EXECUTE_TOOL,
    INVOKE_AGENT,
    MAX_NAME,
    OPERATION,
    RESPONSE_ID,
    TOOL_ARGUMENTS,
    TOOL_CALL_ID,
    TOOL_NAME,
    TOOL_RESULT,
    UNKNOWN_TOOL,
    text,
)

FRAMEWORK = "otel"
MOST_ABOVE = 100
"""Ancestors of a span that are looked at. Who sends ten thousand spans, each below the last, must not hold up a runner."""
LONGEST_PATH = 32
"""Names in a caller's path; of more the innermost stay."""
DEEPEST = 32
"""Levels of a tool's arguments that are read as JSON; deeper ones stay text, which any store and any reader can take."""


def with_spans(outcome: Outcome, spans: Sequence[Span], calls: Sequence[Transition]) -> Outcome:
    """The outcome with the tool runs and the callers that only its spans know.

    A tool run is known already when its call id was reported; then a span can only tell that one whose status was `unknown`
    failed: the span of a run that was cancelled, or that never came to be, ends like that of one that went well. A call is
    named after the agent whose span encloses the span with its response id, unless somebody named it before.
    """
    if not spans:
        return outcome
    tree = _Tree(spans)
    named = {call.id for call in calls if call.caller == UNNAMED} - set(outcome.labels)
    labels = {response: caller for response, caller in _callers(tree).items() if response in named}
    seen = [_tool_event(tree, span) for span in tree.spans if _is(span, EXECUTE_TOOL) and not _is_unknown(span)]
    unknown = [_unknown_tool(span, calls) for span in tree.spans if _is_unknown(span)]
    events = _merged(outcome.tool_events, [*seen, *unknown])
    return replace(outcome, tool_events=events, labels={**outcome.labels, **labels})


class _Tree:
    """Spans in the order they began, and the way from each to the top. Parents that were never exported end the way."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.started_at, span.span_id))
        self._by_id = {span.span_id: span for span in self.spans}

    def above(self, span: Span) -> Iterator[Span]:
        """The ancestors, innermost first, `MOST_ABOVE` at most; a circle of parents is gone round once."""
        seen = {span.span_id}
        parent = self._by_id.get(span.parent_id)
        while parent is not None and parent.span_id not in seen and len(seen) <= MOST_ABOVE:
            seen.add(parent.span_id)
            yield parent
            parent = self._by_id.get(parent.parent_id)

    def caller(self, span: Span) -> Caller | None:
        """The agent around a span, or named on it; in its path, every agent and tool around it, as adapters tell them."""
        agent, names = "", list[str]()
        for outer in self.above(span):
            name = ""
            if _is(outer, INVOKE_AGENT):
                name = _name(outer, AGENT_NAME, INVOKE_AGENT)
                agent = agent or name
            elif _is(outer, EXECUTE_TOOL):
                name = _name(outer, TOOL_NAME, EXECUTE_TOOL)
            if name and names[-1:] != [name]:
                names.append(name)
            if agent and len(names) == LONGEST_PATH:
                break
        if not agent and (agent := text(span.attributes, AGENT_NAME)):
            names.insert(0, agent[:MAX_NAME])
        path = tuple(reversed(names[:LONGEST_PATH]))
        return Caller(agent[:MAX_NAME], path, span.span_id, span.parent_id, FRAMEWORK) if agent else None


def _is(span: Span, operation: str) -> bool:
    return span.attributes.get(OPERATION) == operation


def _name(span: Span, attribute: str, operation: str) -> str:
    return (text(span.attributes, attribute) or span.name.removeprefix(operation).strip() or operation)[:MAX_NAME]


def _callers(tree: _Tree) -> dict[str, Caller]:
    """Who made the call with each response id. Where several spans tell of one call, the longest path knows most."""
    found: dict[str, Caller] = {}
    for span in tree.spans:
        response = "" if _is_unknown(span) else text(span.attributes, RESPONSE_ID)
        caller = tree.caller(span) if response else None
        if caller is not None and (response not in found or len(caller.path) > len(found[response].path)):
            found[response] = caller
    return found


def _tool_event(tree: _Tree, span: Span) -> ToolEvent:
    failed = span.status == "error" or ERROR_TYPE in span.attributes
    caller = tree.caller(span) or UNNAMED
    return ToolEvent(
        name=_name(span, TOOL_NAME, EXECUTE_TOOL),
        status="error" if failed else "ok",
        call_id=text(span.attributes, TOOL_CALL_ID),
        arguments=_arguments(span.attributes),
        output=text(span.attributes, TOOL_RESULT),
        error=span.error,
        caller=replace(caller, span_id=span.span_id, parent_id=span.parent_id, framework=FRAMEWORK),
        at=span.ended_at,
    )


def _is_unknown(span: Span) -> bool:
    """Whether a span is the gateway's own, of a tool that the model has invented."""
    return _is(span, EXECUTE_TOOL) and text(span.attributes, ERROR_TYPE) == UNKNOWN_TOOL


def _unknown_tool(span: Span, calls: Sequence[Transition]) -> ToolEvent:
    response = text(span.attributes, RESPONSE_ID)
    return ToolEvent(
        name=text(span.attributes, TOOL_NAME),
        status="error",
        call_id=text(span.attributes, TOOL_CALL_ID),
        arguments=_arguments(span.attributes),
        error=span.error,
        caller=next((call.caller for call in calls if call.id == response), UNNAMED),
        at=span.ended_at,
        response_id=response,
        kind=UNKNOWN_TOOL,
    )


def _arguments(attributes: Mapping[str, Json]) -> Json:
    """The convention is an object, but attributes were texts for long: a text that is JSON is what it says."""
    said = attributes.get(TOOL_ARGUMENTS)
    if not isinstance(said, str):
        return said
    try:
        read = cast("Json", orjson.loads(said))
    except orjson.JSONDecodeError:
        return said
    return said if _deep(read) else read


def _deep(value: Json) -> bool:
    """Whether lists and objects are nested more than `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(inner, list | dict) for inner in level)


def _merged(reported: Sequence[ToolEvent], seen: Sequence[ToolEvent]) -> tuple[ToolEvent, ...]:
    """Reported and seen tool runs, each once, in the order they ended; of one call id, the outermost span counts."""
    events = list(reported)
    by_id = {event.call_id: place for place, event in enumerate(events) if event.call_id}
    for event in seen:
        if event.kind:
            _add_unknown(events, event)
            continue
        place = by_id.get(event.call_id) if event.call_id else None
        if place is None:
            by_id[event.call_id] = len(events)
            events.append(event)
        elif events[place].status == "unknown" and event.status == "error":
            events[place] = replace(events[place], status="error", error=events[place].error or event.error)
    return tuple(sorted(events, key=lambda event: event.at)) if len(events) > len(reported) else tuple(events)


def _add_unknown(events: list[ToolEvent], event: ToolEvent) -> None:
    """Take the call of a tool that its request did not offer: the run that was reported of it is marked; what ran well was a
    tool all the same, which another request had offered."""
    for place, known in enumerate(events):
        if known.name != event.name or known.kind or known.call_id not in ("", event.call_id):
            continue
        if known.status != "ok":
            given = event.arguments if known.arguments is None else known.arguments
            error = known.error or event.error
            events[place] = replace(known, status="error", kind=event.kind, arguments=given, error=error)
        return
    events.append(event)
