"""The AutoGen agent against a scripted policy server behind the real gateway: its requests, names, tools and grades."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.runner.inline import InlineRunner
from lightning.runner.lease_loop import work
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.types import Rollout, Run, Status, Task, ToolEvent, Transition
from lightning_examples.calculator import calculate
from lightning_examples.math_autogen import agent as module
from lightning_examples.math_autogen.agent import MAX_CALLS, MAX_TOKENS, NAME, SYSTEM, agent, grade
from lightning_examples.math_autogen.make_model import NOISY, demonstrate
from lightning_examples.math_autogen.tasks import tasks
from lightning_examples.recipe.chatml import Conversation, render

TASK = Task(input="Mia has 12 pens. First Mia finds 3 more. How many pens now?", expected=15)


def step(expression: str, call_id: str = "call-1") -> Reply:
    return Reply("", tool_calls=[ToolCall("calculate", f'{{"expression": "{expression}"}}', call_id)])


@dataclass(frozen=True)
class Played:
    rollout: Rollout
    requests: Sequence[dict[str, Any]]
    calls: Sequence[Transition]
    events: Sequence[ToolEvent]


@pytest.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    """Connections belong to an event loop, and each test has its own."""
    yield
    await module._http().aclose()
    module._http.cache_clear()


async def play(*replies: Reply, task: Task = TASK) -> Played:
    """One rollout with scripted replies: what it came to, and what the server and the store saw."""
    config = RunnerConfig(concurrency=1, timeout=60, adapters=("autogen",))
    store, runner = MemoryStore(), InlineRunner(agent, config)
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", task, "g")])
    async with FakeVLLM(model="policy") as fake:  # AutoGen warns when an answer names another model than was asked
        fake.queue(*replies)
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        await runner.start()
        try:
            await work(store, runner, "run", gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()
        (rollout,) = (await store.list_rollouts("run")).items
        requests = [dict(request.body) for request in fake.requests]
    played = Played(
        rollout, requests, await store.transitions("r"), list((await store.attempts_of([("r", None)]))[0].tool_events)
    )
    await store.close()
    return played


async def test_it_calls_the_tool_reads_the_result_and_answers() -> None:
    played = await play(step("12 + 3"), Reply("The answer is 15."))
    assert (played.rollout.status, played.rollout.error, played.rollout.reward) == (Status.SUCCEEDED, "", 1.0)
    first, second = played.requests
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][0]["content"] == SYSTEM
    assert first["messages"][1]["content"] == TASK.input
    assert first["max_tokens"] == MAX_TOKENS
    assert "temperature" not in first
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculate"]
    asked, answered = second["messages"][2:]
    assert asked["tool_calls"][0]["function"] == {"name": "calculate", "arguments": '{"expression": "12 + 3"}'}
    assert (answered["role"], answered["content"]) == ("tool", "15")


async def test_calls_bear_the_agent_s_name_and_tools_their_status() -> None:
    played = await play(step("12 pens + 3", "call-1"), step("12 + 3", "call-2"), Reply("The answer is 15."))
    assert played.rollout.reward == 1.0
    assert {(call.caller.agent, call.caller.framework) for call in played.calls} == {(NAME, "autogen")}
    assert [(event.name, event.status) for event in played.events] == [("calculate", "error"), ("calculate", "ok")]


async def test_it_gives_up_after_so_many_calls() -> None:
    played = await play(*[step("12 + 3")] * (MAX_CALLS + 1))
    assert (played.rollout.status, played.rollout.reward) == (Status.SUCCEEDED, 0.0)
    assert len(played.requests) == MAX_CALLS


async def test_bad_calls_are_answered_with_an_error_the_model_can_read() -> None:
    calls = [ToolCall("delete", "{}", "a"), ToolCall("calculate", "{}", "b"), ToolCall("calculate", "[]", "c")]
    played = await play(Reply("", tool_calls=calls), Reply("The answer is 15."))
    assert played.rollout.reward == 1.0
    results = [message["content"] for message in played.requests[1]["messages"] if message["role"] == "tool"]
    assert len(results) == 3
    assert all("rror" in result for result in results)


@pytest.mark.parametrize("seed", range(6))
async def test_the_model_was_taught_what_autogen_sends(seed: int) -> None:
    (task,) = tasks(1, seed)
    taught = demonstrate(task, random.Random(seed), NOISY)
    said = [message for message in taught.messages if message["role"] == "assistant"]
    played = await play(*(as_reply(message) for message in said), task=task)
    turns = [index for index, message in enumerate(taught.messages) if message["role"] == "assistant"]
    assert len(played.requests) == len(turns)
    for turn, request in zip(turns, played.requests, strict=True):
        assert request["tools"] == taught.tools
        assert render(Conversation(request["messages"], request["tools"])) == render(
            Conversation(taught.messages[:turn], taught.tools)
        )


def as_reply(message: Any) -> Reply:
    calls = [
        ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"])
        for call in message.get("tool_calls", ())
    ]
    return Reply(message["content"] or "", tool_calls=calls)


@pytest.mark.parametrize(
    ("reply", "expected", "reward"),
    [
        ("The answer is 15.", 15, 1.0),
        ("So the answer is 15", "15", 1.0),
        ("The answer is $1,500.\n", "1500", 1.0),
        ("The answer is 2.50.", "5/2", 1.0),
        ("The answer is 2/3.", "2/3", 1.0),
        ("The answer is 0.666667.", "2/3", 1.0),
        ("The answer is 0.667.", "2/3", 0.0),
        ("The answer is 1000001.", 1000000, 0.0),
        ("The answer is 15.5", 15, 0.0),
        ("The answer is 150.", 15, 0.0),
        ("The answer is -15.", 15, 0.0),
        ("The answer is 15 or 16.", 15, 0.0),
        ("The answer is 1/0.", 15, 0.0),
        ("15", 15, 0.0),
        ("", 15, 0.0),
    ],
)
def test_only_the_exact_number_is_right(reply: str, expected: int | str, reward: float) -> None:
    assert grade(reply, Task("?", expected)) == reward


@given(st.integers(), st.integers())
def test_one_whole_number_is_right_and_no_other(said: int, expected: int) -> None:
    assert grade(f"The answer is {said}.", Task("?", str(expected))) == float(said == expected)
    assert grade(f"The answer is {expected:,}.", Task("?", str(expected))) == 1.0


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000))
def test_a_number_as_the_calculator_shows_it_is_right(expected: Any) -> None:
    shown = calculate(f"{expected.numerator} / {expected.denominator}")
    assert grade(f"The answer is {shown}.", Task("?", str(expected))) == 1.0
