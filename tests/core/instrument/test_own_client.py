"""What a request of a framework's own HTTP client has to carry."""

from __future__ import annotations

import json
from collections.abc import Iterator

import lightning
import pytest
from lightning.instrument import activate, install_tap, mark_request
from lightning.plugins import plugins
from lightning.types import LLM, ToolEvent

ONE = LLM("http://127.0.0.1:4000/v1", "key-of-one", "policy")
OURS, ELSEWHERE = "http://127.0.0.1:4000/v1/chat/completions", "http://127.0.0.1:5000/v1/chat/completions"
KEY = [("Authorization", "Bearer key-of-one")]


@pytest.fixture(autouse=True)
def raw() -> Iterator[None]:
    undo = [install_tap(), plugins().install_adapters(lambda event: None, ["raw"])]
    yield
    for each in undo:
        each()


def test_a_request_to_the_gateway_says_whose_it_is_and_a_reward_follows_its_answer() -> None:
    with activate(ONE) as session, lightning.component("writer"):
        marked = mark_request(OURS, [*KEY, ("X-Own", "1")])
        assert marked.added["x-lightning-rollout"] == "key-of-one"
        assert json.loads(marked.added["x-lightning-caller"])["agent"] == "writer"
        assert not {"authorization", "x-own"} & set(marked.added)
        marked.answered(200, [("X-Request-Id", "call-1")])
        lightning.reward(1.0)
        session.add_tool_event(ToolEvent("search", "ok"))
    assert session.step_rewards[0].response_id == session.tool_events[0].response_id == "call-1"


def test_a_refused_request_is_no_call_that_a_reward_could_follow() -> None:
    with activate(ONE) as session:
        mark_request(OURS, KEY).answered(429, [("x-request-id", "call-1")])
        lightning.reward(1.0)
    assert session.step_rewards[0].response_id == ""


def test_requests_to_elsewhere_and_outside_a_rollout_carry_nothing() -> None:
    with activate(ONE):
        assert mark_request(ELSEWHERE, KEY).added == {}
        assert mark_request("http://[no-address/v1", KEY).added == {}
    outside = mark_request(OURS, KEY)
    outside.answered(200, [("x-request-id", "call-1")])
    assert outside.added == {}
