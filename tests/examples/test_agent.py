"""The agent against a scripted policy server, its grader and its tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.types import LLM, Task
from lightning_examples.calculator import calculate
from lightning_examples.raw_python.agent import MAX_CALLS, MAX_TOKENS, SYSTEM, agent, grade, run_tool

TASK = Task(input="Mia has 12 pens. First Mia finds 3 more. How many pens now?", expected=15)
STEP = Reply("", tool_calls=[ToolCall("calculate", '{"expression": "12 + 3"}', "call-1")])


async def play(*replies: Reply) -> tuple[float, list[dict[str, Any]]]:
    """Run the agent on TASK with scripted replies; its reward and the requests it sent."""
    async with FakeVLLM() as fake:
        fake.queue(*replies)
        reward = await asyncio.to_thread(agent, TASK, LLM(f"{fake.url}/v1", "the-key", fake.model))
        assert all(request.headers["authorization"] == "Bearer the-key" for request in fake.requests)
        return reward, [dict(request.body) for request in fake.requests]


async def test_it_calls_the_tool_reads_the_result_and_answers() -> None:
    reward, requests = await play(STEP, Reply("The answer is 15."))
    assert reward == 1.0
    first, second = requests
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][0]["content"] == SYSTEM
    assert first["messages"][1]["content"] == TASK.input
    assert first["max_tokens"] == MAX_TOKENS
    assert "temperature" not in first
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculate", "search", "clock"]
    asked, answered = second["messages"][2:]
    assert asked["tool_calls"][0]["function"] == {"name": "calculate", "arguments": '{"expression": "12 + 3"}'}
    assert answered == {"role": "tool", "tool_call_id": "call-1", "content": "15"}


async def test_a_wrong_answer_earns_nothing() -> None:
    reward, _ = await play(Reply("The answer is 14."))
    assert reward == 0.0


async def test_it_gives_up_after_so_many_calls() -> None:
    reward, requests = await play(*[STEP] * (MAX_CALLS + 1))
    assert (reward, len(requests)) == (0.0, MAX_CALLS)


async def test_bad_calls_are_answered_with_an_error_the_model_can_read() -> None:
    calls = [ToolCall("delete", "{}", "a"), ToolCall("calculate", "{}", "b"), ToolCall("calculate", '"12"', "c")]
    reward, requests = await play(Reply("", tool_calls=calls), Reply("The answer is 15."))
    assert reward == 1.0
    results = [message["content"] for message in requests[1]["messages"] if message["role"] == "tool"]
    assert results == ["error: unknown tool", "error: wrong arguments", "error: bad arguments"]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("The answer is 15.", 1.0),
        ("So the answer is 15", 1.0),
        ("The answer is 15.\n", 1.0),
        ("The answer is 15.5", 0.0),
        ("The answer is 150.", 0.0),
        ("The answer is -15.", 0.0),
        ("The answer is 15 or 16.", 0.0),
        ("15", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_answer_is_right(reply: str, reward: float) -> None:
    assert grade(reply, TASK) == reward


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 + 3", "15"), ("7*-2", "-14"), ("(1 + 2) * 3", "9"), ("7 / 2", "3.5"), ("8 / 2", "4"), (" 0.1 + 0.2", "0.3")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "2 ** 99",
        "9 << 9",
        "pens",
        "True + 1",
        "'a' * 9",
        "[1][0]",
        "__import__('os').getcwd()",
        "(lambda: 1)()",
        "1 if 1 else 2",
        "1e400",
        "1e400 - 1e400",
        "1e12 * 2",
        "1j",
        "1; 2",
        "9" * 99,
        "(" * 99,
        "-" * 99 + "1" * 9,
        "\0",
    ],
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


@settings(deadline=None)
@given(st.text())
def test_a_tool_answers_any_text_with_text(text: str) -> None:
    for name in ("calculate", "search", "clock", text):
        for arguments in (text, json.dumps(text), json.dumps({"expression": text}), json.dumps({"query": text})):
            assert isinstance(run_tool(name, arguments), str)


@settings(deadline=None)
@given(st.integers(-999, 999), st.sampled_from("+-*"), st.integers(0, 999))
def test_the_calculator_agrees_with_python(left: int, sign: str, right: int) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert calculate(f"{left} {sign} {right}") == str(expected)
