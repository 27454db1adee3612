"""Rewards, tracebacks and the JSON between the processes."""

from __future__ import annotations

import json
import math
import string
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning.instrument import ActiveAttempt
from lightning.instrument.texts import MAX_REWARD
from lightning.runner import outcomes
from lightning.runner.socket_framing import LONGEST_REPLY
from lightning.types import LLM, Caller, Fault, Json, Outcome, StepReward, StepState, Task, ToolEvent

SESSION = ActiveAttempt(LLM("http://127.0.0.1:1/v1", "secret-key", "policy"))

text = st.text(st.characters(exclude_categories=["Cs"]))
finite = st.floats(-MAX_REWARD, MAX_REWARD)
jsons: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
callers = st.builds(Caller, text, st.lists(text, max_size=3).map(tuple), text, text, text)
events = st.builds(
    ToolEvent, text, st.sampled_from(["ok", "error", "unknown"]), text, jsons, text, text, st.none() | callers, finite
)
reports = {
    "seconds": finite,
    "tool_events": st.lists(events, max_size=2).map(tuple),
    "step_rewards": st.lists(st.builds(StepReward, finite, text, text, finite), max_size=2).map(tuple),
    "labels": st.dictionaries(text, callers, max_size=2),
}
any_outcome = st.builds(
    Outcome, reward=finite, rewards=st.dictionaries(text, finite, max_size=3), **reports
) | st.builds(Outcome, fault=st.sampled_from(Fault), error=text, **reports)


@given(any_outcome)
def test_an_outcome_survives_the_wire(outcome: Outcome) -> None:
    assert outcomes.decode_outcome(outcomes.encode_outcome(outcome)) == outcome


@given(st.builds(Task, jsons, jsons, st.dictionaries(text, jsons, max_size=2)), text)
def test_a_request_survives_the_wire(task: Task, key: str) -> None:
    llm = LLM("http://127.0.0.1:1/v1", key, "policy")
    assert outcomes.decode_request(outcomes.encode_request(task, llm)) == (task, llm)


@given(st.binary() | jsons.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_outcome_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        outcomes.decode_outcome(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", math.nan),
        ("reward", "1"),
        ("reward", None),
        ("fault", "agent"),
        ("fault", "nobody"),
        ("rewards", {"a": math.inf}),
        ("rewards", [1]),
        ("step_rewards", [{"value": math.nan, "name": "", "response_id": "", "at": 0}]),
        ("tool_events", [{"name": "a"}]),
        ("labels", [["chat-1", {"agent": "a"}]]),
        ("labels", {"chat-1": "a"}),
        ("labels", {"chat-1": {"agent": "a"}}),
    ],
)
def test_a_worker_that_lies_is_caught(field: str, value: object) -> None:
    fields = json.loads(outcomes.encode_outcome(Outcome(reward=1.0)))
    with pytest.raises(ValueError):
        outcomes.decode_outcome(json.dumps({**fields, field: value}).encode())


def test_an_agents_process_speaks_for_no_plugin() -> None:
    outcome = Outcome(reward=1.0, extras={"texts": b"\1"})
    assert outcomes.sanitized(outcome) == Outcome(reward=1.0)
    said = json.loads(outcomes.encode_outcome(outcome)) | {"extras": {"texts": "AQ=="}}
    assert outcomes.decode_outcome(json.dumps(said).encode()) == Outcome(reward=1.0)


def test_text_and_arguments_of_any_kind_become_json() -> None:
    event = ToolEvent("t", "ok", output="lone \ud800", arguments={"a": {1, 2}})  # type: ignore[dict-item]
    (clean,) = outcomes.decode_outcome(outcomes.encode_outcome(Outcome(reward=1.0, tool_events=(event,)))).tool_events
    assert clean.output == "lone ?"
    assert clean.arguments == {"a": "{1, 2}"}


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Outcome(reward=1.0), []),
        (Outcome(reward=1.0, tool_events=(ToolEvent("t", "ok", arguments=threading.Lock()),)), ["tool arguments"]),  # type: ignore[arg-type]
        (Outcome(reward=1.0, step_states=(StepState(threading.Lock(), "s"),)), ["the reward and"]),  # type: ignore[arg-type]
        (Outcome(reward=1.0, rewards={"x" * LONGEST_REPLY: 1.0}), ["the reward alone"]),
    ],
)
def test_a_report_that_cannot_be_sent_whole_is_told_once(
    outcome: Outcome, kept: list[str], warnings_of: Callable[[], list[str]]
) -> None:
    assert outcomes.sanitized(outcome).reward == 1.0
    assert [said for said in warnings_of() if not any(each in said for each in kept)] == []
    assert len(warnings_of()) == len(kept)


def test_arguments_that_json_cannot_say_cost_only_themselves() -> None:
    endless: list[object] = []
    endless.append(endless)
    for arguments in (endless, {(1, 2): 3}, threading.Lock()):
        event = ToolEvent("t", "ok", arguments=arguments)  # type: ignore[arg-type]
        outcome = outcomes.decode_outcome(outcomes.encode_outcome(Outcome(reward=1.0, tool_events=(event,))))
        assert outcome == Outcome(reward=1.0, tool_events=(ToolEvent("t", "ok"),))


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (0.25, 0.25, {}),
        (np.float32(0.5), 0.5, {}),
        (np.array(2), 2.0, {}),
        ({"reward": 0.7, "format": 1}, 0.7, {"reward": 0.7, "format": 1.0}),
        ({"exact": 1.0, "format": 0.5}, 1.5, {"exact": 1.0, "format": 0.5}),
    ],
)
def test_rewards(value: object, reward: float, parts: dict[str, float]) -> None:
    assert outcomes.score(value) == (reward, parts)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1.0", b"1", [1.0], 1j, np.array([1.0, 2.0])),
        *(math.nan, math.inf, -math.inf, 1e39, 3e38, -1.001e12, 10**400),
        *({}, {"a": None}, {"a": math.nan}, {"a": 1e12, "b": 1e12}),
    ],
)
def test_what_is_no_reward_is_the_agents_fault_and_says_the_cure(value: object) -> None:
    with pytest.raises(DataError, match="return the reward as a finite number"):
        outcomes.score(value)
    outcome = outcomes.returned(value, SESSION, 1.0)
    assert (outcome.reward, outcome.fault) == (None, Fault.AGENT)
    assert "return the reward as a finite number" in outcome.error


def test_what_an_agent_reported_is_kept_however_it_ends() -> None:
    session = ActiveAttempt(SESSION.llm)
    session.add_label("chat-1", Caller("writer"))
    session.add_step_reward(StepReward(1.0, at=1.0))
    session.add_tool_event(ToolEvent("t", "ok", at=1.0))
    for outcome in (
        outcomes.returned(1.0, session, 1.0),
        outcomes.returned("no reward", session, 1.0),
        outcomes.raised(RuntimeError("x"), session, 1.0),
        outcomes.failed(Fault.TIMEOUT, "slow", session),
    ):
        assert outcome.labels == {"chat-1": Caller("writer")}
        assert outcome.step_rewards == session.step_rewards
        assert outcome.tool_events == session.tool_events


def test_the_end_of_a_traceback_is_kept_without_the_key() -> None:
    def deep(depth: int) -> None:
        if depth == 0:
            raise RuntimeError("the cause with secret-key " + "x" * 100)
        deep(depth - 1)

    try:
        deep(3)
    except RuntimeError as error:
        outcome = outcomes.raised(error, SESSION, 1.0)
    assert outcome.fault is Fault.AGENT
    assert "in deep" in outcome.error
    assert "the cause with <api key> xxx" in outcome.error
    assert "secret-key" not in outcome.error
    long = outcomes.failed(Fault.AGENT, "a" + string.ascii_letters * 1000 + "the end")
    assert len(long.error) == outcomes.MAX_ERROR + 1
    assert long.error.endswith("the end")


@pytest.mark.parametrize(
    "words",
    [
        "Event loop is closed",
        "got Future <Future pending> attached to a different loop",
        "<asyncio.locks.Lock object> is bound to a different event loop",
    ],
)
def test_a_client_of_another_event_loop_has_its_cure(words: str) -> None:
    try:
        try:
            raise RuntimeError(words)
        except RuntimeError as cause:
            raise ConnectionError("Connection error.") from cause  # as the OpenAI client does
    except ConnectionError as error:
        outcome = outcomes.raised(error, SESSION, 1.0)
    assert outcome.error.endswith("belong to the event loop they began in)")
    assert "make it `async def` and await instead" in outcome.error
    assert "async def" not in outcomes.raised(RuntimeError("anything else"), SESSION, 1.0).error


class NoFloat:
    """A number that is none."""

    def __init__(self, error: type[BaseException] = KeyError) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error("no float")


class NoText:
    """Neither a number nor anything that can be said."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", [NoFloat(), NoText(), {"reward": NoFloat()}, [NoText()]])
def test_an_object_that_cannot_even_be_asked_is_no_reward(value: object) -> None:
    outcome = outcomes.returned(value, SESSION, 1.0)
    assert (outcome.reward, outcome.fault) == (None, Fault.AGENT)
    assert "return the reward as a finite number" in outcome.error


def test_a_reward_beyond_the_largest_is_refused_with_the_range() -> None:
    assert outcomes.score(MAX_REWARD) == (MAX_REWARD, {})
    with pytest.raises(DataError, match=r"is 1e\+20, which cannot be trained on: .* between -1e\+12 and 1e\+12"):
        outcomes.score(1e20)


def test_an_exception_without_words_is_still_an_outcome() -> None:
    class NoNotesError(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError("no notes")

        def __str__(self) -> str:
            raise RuntimeError("no text")

    outcome = outcomes.raised(NoNotesError(), SESSION, 1.0)
    assert outcome.fault is Fault.AGENT
    assert "NoNotesError" in outcome.error


def test_a_reward_is_never_lost_because_the_reports_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "LONGEST_REPLY", 1000)
    broken = ToolEvent("t", "ok", arguments=NoText(), output="x" * 100)  # type: ignore[arg-type]
    kept = outcomes.sanitized(Outcome(reward=0.5, rewards={"a": 0.5}, tool_events=(broken,)))
    assert (kept.reward, kept.rewards, kept.tool_events[0].output) == (0.5, {"a": 0.5}, "x" * 100)
    large = replace(broken, output="x" * 1000)
    assert outcomes.sanitized(Outcome(reward=0.5, rewards={"a": 0.5}, tool_events=(large,))) == Outcome(
        reward=0.5, rewards={"a": 0.5}
    )
    assert outcomes.sanitized(Outcome(reward=0.5, rewards={"a" * 1000: 0.5})) == Outcome(reward=0.5)


def test_so_are_reports_of_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MOST_VALUES", 100)
    event = ToolEvent("t", "ok", arguments=[0] * 1000, output="x")
    kept = outcomes.sanitized(Outcome(reward=0.5, tool_events=(event,)))
    assert (kept.reward, kept.tool_events) == (0.5, (replace(event, arguments=None),))


def test_what_could_not_have_come_from_another_process_is_the_agents_fault() -> None:
    for wrong in (Outcome(reward=math.nan), Outcome(reward=1.0, step_rewards=(StepReward(1e39),)), Outcome()):
        outcome = outcomes.sanitized(wrong)
        assert (outcome.reward, outcome.fault) == (None, Fault.AGENT)
        assert "cannot be used" in outcome.error
