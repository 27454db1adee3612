"""Adds what an attempt's spans show about tools and agents to its outcome.

The invariant: the result depends only on the outcome, the spans and the calls, so it is the same wherever it is computed. What
the agent's own process reported is never contradicted: spans only add what was not reported.
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
"""The most ancestors of a span that are looked at. A client that sends ten thousand nested spans must not hold up a runner."""
LONGEST_PATH = 32
"""The most names in a caller's path; of a longer path the innermost names stay."""
DEEPEST = 32
"""The most levels of a tool's arguments that are parsed as JSON; deeper ones stay text, which any store and reader can
handle."""


def with_spans(outcome: Outcome, spans: Sequence[Span], calls: Sequence[Transition]) -> Outcome:
    """Return the outcome with the tool runs and the callers that only its spans show.

    A tool run with a reported call id is already known. Then a span can only turn its status `unknown` into a failure, because
    the span of a run that was cancelled, or never began, ends like that of a success. A call gets the name of the agent whose
    span encloses the span with the call's response id, unless it has a name already.
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
    """The spans in the order they began, with the way from each to its outermost ancestor. The way ends at a parent that was
    never exported."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.started_at, span.span_id))
        self._by_id = {span.span_id: span for span in self.spans}

    def above(self, span: Span) -> Iterator[Span]:
        """Yield a span's ancestors, innermost first, at most `MOST_ABOVE`; each once, even if parents form a circle."""
        seen = {span.span_id}
        parent = self._by_id.get(span.parent_id)
        while parent is not None and parent.span_id not in seen and len(seen) <= MOST_ABOVE:
            seen.add(parent.span_id)
            yield parent
            parent = self._by_id.get(parent.parent_id)

    def caller(self, span: Span) -> Caller | None:
        """Return the agent around a span, or named on it. Its path has every agent and tool around the span, as adapters report
        them."""
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
    """Return the caller of the call with each response id. Where several spans describe one call, the longest path counts."""
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
    """Whether a span is one that the gateway made, of a tool that the model invented."""
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
    """Return a tool's arguments. By convention they are an object, but older attributes are texts: a text that is JSON is
    parsed."""
    said = attributes.get(TOOL_ARGUMENTS)
    if not isinstance(said, str):
        return said
    try:
        read = cast("Json", orjson.loads(said))
    except orjson.JSONDecodeError:
        return said
    return said if _deep(read) else read


def _deep(value: Json) -> bool:
    """Whether lists and objects are nested deeper than `DEEPEST` levels."""
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
    """Return reported and seen tool runs, each once, in the order they ended. Of spans with one call id the outermost
    counts."""
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
    """Add the call of a tool that the request did not offer. A reported run of it is marked; one that succeeded is not, because
    another request had offered the tool."""
    for place, known in enumerate(events):
        if known.name != event.name or known.kind or known.call_id not in ("", event.call_id):
            continue
        if known.status != "ok":
            given = event.arguments if known.arguments is None else known.arguments
            error = known.error or event.error
            events[place] = replace(known, status="error", kind=event.kind, arguments=given, error=error)
        return
    events.append(event)
