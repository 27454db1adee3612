"""What spans say about tools and agents, and what they must not say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.types import Caller, Json, Outcome, Span, ToolEvent, Transition, logprobs, token_ids
from lightning_otel.traces.derive import with_spans

DONE = Outcome(reward=1.0)
NOBODY = Caller("agent")


def span(number: int, parent: int = 0, operation: str = "", **fields: object) -> Span:
    said = {key: fields.pop(key) for key in list(fields) if key not in Span.__slots__}
    attributes: dict[str, Json] = {f"gen_ai.{key.replace('__', '.')}": value for key, value in said.items()}  # type: ignore[misc]
    if operation:
        attributes["gen_ai.operation.name"] = operation
    times = {"started_at": float(number), "ended_at": number + 0.5}
    return Span(
        "r",
        1,
        "t" * 32,
        f"{number:016x}",
        f"{parent:016x}" if parent else "",
        **{**times, **fields},
        attributes=attributes,
    )  # type: ignore[arg-type]


def agent(number: int, name: str, parent: int = 0, **fields: object) -> Span:
    return span(number, parent, "invoke_agent", agent__name=name, **fields)


def tool(number: int, name: str, call_id: str = "", parent: int = 0, **fields: object) -> Span:
    return span(
        number, parent, "execute_tool", tool__name=name, **({"tool__call__id": call_id} if call_id else {}), **fields
    )


def chat(number: int, response: str, parent: int = 0, **fields: object) -> Span:
    return span(number, parent, "chat", response__id=response, **fields)


def call(response: str, caller: Caller = NOBODY) -> Transition:
    empty = token_ids()
    return Transition("r", 1, 0, response, empty, empty, logprobs(), caller)


def test_without_spans_nothing_is_touched() -> None:
    outcome = Outcome(reward=1.0, tool_events=(ToolEvent("b", "ok", at=2.0), ToolEvent("a", "ok", at=1.0)))
    assert with_spans(outcome, [], [call("x")]) is outcome


def test_a_tool_that_ran_elsewhere_becomes_an_event() -> None:
    seen = tool(
        5,
        "look",
        "call_1",
        3,
        tool__call__arguments='{"a": [1, "x"]}',
        tool__call__result="found",
    )
    failed = tool(7, "write", "call_2", status="error", error="disk full", tool__call__arguments="not json")
    typed = span(8, 0, "execute_tool", name="execute_tool guess", error="Timeout")
    typed = replace(typed, attributes={**typed.attributes, "error.type": "Timeout"})
    events = with_spans(DONE, [failed, typed, seen, agent(3, "boss")], []).tool_events
    assert events == (
        ToolEvent(
            "look",
            "ok",
            "call_1",
            {"a": [1, "x"]},
            "found",
            caller=Caller("boss", ("boss",), seen.span_id, seen.parent_id, "otel"),
            at=5.5,
        ),
        ToolEvent(
            "write",
            "error",
            "call_2",
            "not json",
            "",
            "disk full",
            Caller("agent", (), failed.span_id, "", "otel"),
            7.5,
        ),
        ToolEvent("guess", "error", "", None, "", "Timeout", Caller("agent", (), typed.span_id, "", "otel"), 8.5),
    )


def test_one_call_id_is_one_run_and_the_agent_has_the_word() -> None:
    reported = (
        ToolEvent("look", "ok", "call_1", output="mine", at=9.0),
        ToolEvent("look", "unknown", "call_2", at=4.0),
        ToolEvent("silent", "ok", "", at=3.0),
    )
    outcome = Outcome(reward=1.0, tool_events=reported)
    spans = [
        tool(1, "look", "call_1", status="error", error="theirs"),
        tool(2, "look", "call_2", status="error", error="theirs"),
        tool(5, "outer", "call_3"),
        tool(6, "inner", "call_3", status="error"),
        tool(7, "silent"),
    ]
    events = with_spans(outcome, spans, []).tool_events
    assert [(event.name, event.status, event.call_id, event.error, event.at) for event in events] == [
        ("silent", "ok", "", "", 3.0),
        ("look", "error", "call_2", "theirs", 4.0),
        ("outer", "ok", "call_3", "", 5.5),
        ("silent", "ok", "", "", 7.5),
        ("look", "ok", "call_1", "", 9.0),
    ]


UNKNOWN = ToolEvent("pay", "error", "c", {"to": "a"}, error="is not offered", response_id="x", kind="unknown_tool")


@pytest.mark.parametrize(
    ("reported", "known"),
    [
        ([], [UNKNOWN]),
        ([ToolEvent("add", "ok", "c")], [ToolEvent("add", "ok", "c"), UNKNOWN]),
        ([ToolEvent("pay", "ok", "c")], [ToolEvent("pay", "ok", "c")]),
        ([ToolEvent("pay", "ok")], [ToolEvent("pay", "ok")]),
        (
            [ToolEvent("pay", "unknown", "c", output="no such tool")],
            [replace(UNKNOWN, output="no such tool", response_id="")],
        ),
        ([ToolEvent("pay", "error", "c", error="who?")], [replace(UNKNOWN, error="who?", response_id="")]),
    ],
)
def test_a_tool_that_the_model_has_invented_is_one_event(reported: list[ToolEvent], known: list[ToolEvent]) -> None:
    told = tool(
        5,
        "pay",
        "c",
        status="error",
        error="is not offered",
        tool__call__arguments='{"to": "a"}',
        response__id="x",
        agent__name="agent",
    )
    told = replace(told, attributes={**told.attributes, "error.type": "unknown_tool"})
    found = with_spans(replace(DONE, tool_events=tuple(reported)), [told], [call("x")])
    assert [replace(event, at=0.0, caller=None) for event in found.tool_events] == known
    assert found.labels == {}


def test_reported_runs_keep_their_order_when_spans_add_none() -> None:
    reported = (ToolEvent("b", "ok", "2", at=2.0), ToolEvent("a", "unknown", "1", at=1.0))
    outcome = with_spans(Outcome(reward=1.0, tool_events=reported), [tool(1, "a", "1")], [])
    assert outcome.tool_events == reported, "the span of a run that was cancelled ends like any other"


def test_a_call_is_named_after_the_agents_and_tools_around_it() -> None:
    spans = [
        agent(1, "boss", 99),  # its own parent was never exported
        tool(2, "ask_math", "", 1),
        agent(3, "solver", 2),
        span(4, 3, name="solver's own step"),
        chat(5, "chat-1", 4),
        chat(6, "chat-2", 1),
        span(7, 0, "invoke_agent", name="invoke_agent loner"),
        chat(8, "chat-3", 7),
        chat(9, "chat-4", 0, agent__name="spoken for"),
        chat(10, "chat-5", 0),
    ]
    labels = with_spans(DONE, spans, [call(f"chat-{number}") for number in range(1, 6)]).labels
    assert {response: (caller.agent, caller.path) for response, caller in labels.items()} == {
        "chat-1": ("solver", ("boss", "ask_math", "solver")),
        "chat-2": ("boss", ("boss",)),
        "chat-3": ("loner", ("loner",)),
        "chat-4": ("spoken for", ("spoken for",)),
    }
    assert (labels["chat-1"].span_id, labels["chat-1"].framework) == (f"{5:016x}", "otel")


def test_who_was_named_already_keeps_the_name() -> None:
    spans = [
        agent(1, "boss"),
        chat(2, "labelled", 1),
        chat(3, "adapter", 1),
        chat(4, "nobody", 1),
        chat(5, "foreign", 1),
    ]
    outcome = Outcome(reward=1.0, labels={"labelled": Caller("mine"), "foreign": Caller("mine")})
    calls = [call("labelled"), call("adapter", Caller("writer", ("writer",))), call("nobody")]
    labels = with_spans(outcome, spans, calls).labels
    assert {response: caller.agent for response, caller in labels.items()} == {
        "labelled": "mine",
        "foreign": "mine",
        "nobody": "boss",
    }


def test_of_several_spans_of_one_call_the_longest_path_counts() -> None:
    inner, outer = chat(5, "chat-1", 3), chat(2, "chat-1", 1)
    labels = with_spans(DONE, [agent(1, "a"), outer, agent(3, "b", 1), inner], [call("chat-1")]).labels
    assert labels["chat-1"].path == ("a", "b")


@pytest.mark.parametrize("parents", [(1,), (2, 1), (3, 1, 2)], ids=str)
def test_spans_that_are_their_own_ancestors_end(parents: tuple[int, ...]) -> None:
    spans = [agent(number, f"a{number}", parent) for number, parent in enumerate(parents, 1)]
    labels = with_spans(DONE, [*spans, chat(9, "chat-1", 1)], [call("chat-1")]).labels
    assert sorted(labels["chat-1"].path) == [one.name or f"a{number}" for number, one in enumerate(spans, 1)]


SPANS = st.lists(
    st.builds(
        lambda number, parent, operation, name, call_id, bad: span(
            number,
            parent,
            operation,
            **({"agent__name": name} if name else {}),
            tool__call__id=call_id,
            response__id=f"chat-{number % 3}",
            status="error" if bad else "unset",
        ),
        st.integers(1, 8),
        st.integers(0, 8),
        st.sampled_from(("invoke_agent", "execute_tool", "chat", "")),
        st.sampled_from(("a", "b", "")),
        st.sampled_from(("", "1", "2")),
        st.booleans(),
    ),
    unique_by=lambda one: one.span_id,
    max_size=8,
)


@given(SPANS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(spans: list[Span], random) -> None:
    shuffled = list(spans)
    random.shuffle(shuffled)
    calls = [call("chat-0"), call("chat-1"), call("chat-2", Caller("named"))]
    outcome = Outcome(
        reward=1.0, tool_events=(ToolEvent("t", "unknown", "1", at=4.0),), labels={"chat-1": Caller("mine")}
    )
    found = with_spans(outcome, spans, calls)
    assert found == with_spans(outcome, shuffled, calls)
    assert found.labels["chat-1"] == Caller("mine")
    assert "chat-2" not in found.labels
    ids = [event.call_id for event in found.tool_events if event.call_id]
    assert len(ids) == len(set(ids))
    assert {event.name for event in found.tool_events} >= {"t"}


def test_a_tower_of_spans_gives_bounded_paths_in_a_moment() -> None:
    """Each span below the last: of a thousand, the paths to the top would be half a million names."""
    tower = [tool(number, f"t{number}" + "x" * 500, "", number - 1, agent__name="a") for number in range(1, 1001)]
    outcome = with_spans(DONE, [*tower, chat(2000, "chat-1", 1000, agent__name="b" * 500)], [call("chat-1")])
    paths = [event.caller.path for event in outcome.tool_events if event.caller]
    assert max(map(len, paths)) == 32
    assert len(outcome.labels["chat-1"].path) == 32
    assert outcome.labels["chat-1"].path[-2][:6] == "t1000x"  # the innermost stay
    names = {name for path in [*paths, outcome.labels["chat-1"].path] for name in path}
    assert max(map(len, [*names, *(event.name for event in outcome.tool_events)])) == 256


@pytest.mark.parametrize("said", ["[" * 990 + "]" * 990, '{"a":' * 500 + "1" + "}" * 500])
def test_arguments_that_are_nested_too_deep_stay_text(said: str) -> None:
    """A store could not write them, or would write what a reader further down the stack cannot read."""
    (event,) = with_spans(DONE, [tool(1, "t", tool__call__arguments=said)], []).tool_events
    assert event.arguments == said
    (event,) = with_spans(DONE, [tool(1, "t", tool__call__arguments='[{"a": [1, {}]}, {}]')], []).tool_events
    assert event.arguments == [{"a": [1, {}]}, {}]
