"""The state that an agent tells is recorded with the next call of its flow; a tool's result whole or marked."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.bounded import Once
from lightning.instrument import ActiveAttempt, activate, context
from lightning.instrument.texts import MAX_RESULT, MAX_STATE
from lightning.redaction import redacted_outcome
from lightning.runner.outcomes import decode_outcome, encode_outcome, returned
from lightning.types import LLM, StepState

ONE = LLM("http://127.0.0.1:8000/v1", "one", "policy")
SECRET = "sk-" + "a1B2" * 10
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def told(session: ActiveAttempt) -> list[tuple[Any, str]]:
    return [(state.values, state.response_id) for state in session.step_states]


def test_a_state_belongs_to_the_next_call_and_the_last_to_none() -> None:
    with activate(ONE) as session:
        lightning.state(turn=1)
        lightning.state(board=[1, None])
        session.calls.add("call-1", "a")
        session.calls.add("call-2", "a")
        lightning.state(turn=2)
    assert told(session) == [({"turn": 1}, "call-1"), ({"board": [1, None]}, "call-1"), ({"turn": 2}, "")]


async def test_flows_side_by_side_tell_of_their_own_calls() -> None:
    async def player(name: str, session: ActiveAttempt) -> None:
        lightning.state(name=name)
        await asyncio.sleep(0.01)
        await asyncio.create_task(call(session, name))  # what it starts counts as its own

    async def call(session: ActiveAttempt, name: str) -> None:
        session.calls.add(f"call-{name}", "a")

    with activate(ONE) as session:
        await asyncio.gather(*(player(name, session) for name in "xyz"))
    assert sorted((state.values["name"], state.response_id) for state in session.step_states) == [  # type: ignore[index,call-overload]
        (name, f"call-{name}") for name in "xyz"
    ]


def test_what_json_cannot_say_is_said_in_words_and_what_is_too_long_is_cut() -> None:
    with activate(ONE) as session:
        lightning.state(who={1, 2}, when=float("nan"))
        lightning.state(long="x" * (2 * MAX_STATE))
        endless: list[object] = []
        endless.append(endless)
        lightning.state(endless=endless)
    first, second, third = (state.values for state in session.step_states)
    assert first == {"who": "{1, 2}", "when": "NaN"}
    assert isinstance(second, str)
    assert len(second) == MAX_STATE
    assert isinstance(third, str)


def test_outside_a_rollout_a_state_does_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_said", Once())
    lightning.state(turn=1)
    lightning.state(turn=2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_state_goes_the_way_of_the_outcome_without_credentials() -> None:
    with activate(ONE) as session:
        lightning.state(note=f"use {SECRET}", password="hush")
        outcome = decode_outcome(encode_outcome(returned(1.0, session, 0.0)))
    (state,) = redacted_outcome(outcome).step_states
    assert isinstance(state, StepState)
    assert state.values == {"note": "use [redacted]", "password": "[redacted]"}


# tools ----------------------------------------------------------------------------------------------------------------


def run_tool(value: object) -> tuple[str, str, bool]:
    @lightning.tool
    def given() -> object:
        return value

    with activate(ONE) as session:
        given()
        outcome = decode_outcome(encode_outcome(returned(1.0, session, 0.0)))
    (event,) = redacted_outcome(outcome).tool_events
    return event.output, event.result, event.incomplete


@given(JSON)
def test_whatever_json_a_tool_returns_is_kept_whole(value: Any) -> None:
    output, result, incomplete = run_tool(value)
    assert not incomplete
    assert (json.loads(result) if result else output) == value


def test_a_long_result_is_kept_whole_up_to_the_limit_and_then_marked() -> None:
    rows = [{"n": number, "text": "row " * 5} for number in range(5000)]
    output, result, incomplete = run_tool(rows)
    assert (json.loads(result), incomplete) == (rows, False)
    assert len(output) < 5000
    assert run_tool("x" * MAX_RESULT)[1:] == ("", True)
    assert run_tool(object())[1:] == ("", True)
    assert run_tool((1, 2))[1:] == ("[1, 2]", True)  # the same in JSON, another thing in Python


def test_a_result_with_a_credential_is_marked() -> None:
    assert run_tool({"key": SECRET})[1:] == ('{"key": "[redacted]"}', True)
    assert run_tool(f"key {SECRET}") == ("key [redacted]", "", True)


def test_a_stream_of_more_items_than_are_kept_is_marked() -> None:
    @lightning.tool
    def numbers(count: int) -> Iterator[int]:
        yield from range(count)

    with activate(ONE) as session:
        list(numbers(10))
        list(numbers(10_000))
    first, second = session.tool_events
    assert (json.loads(first.result), first.incomplete) == (list(range(10)), False)
    assert (second.result, second.incomplete) == ("", True)


def test_results_beyond_what_a_rollout_may_report_are_marked_and_their_events_kept() -> None:
    rows = ["x" * 1000] * 1000

    @lightning.tool
    def rows_of() -> list[str]:
        return rows

    with activate(ONE) as session, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        for _ in range(12):
            rows_of()
    kept = [event.incomplete for event in session.tool_events]
    assert len(kept) == 12
    assert kept == sorted(kept)
    assert kept.count(True) >= 3
