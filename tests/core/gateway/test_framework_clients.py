"""The clients of agent frameworks that speak Responses or Messages: what they send arrives, what they get they understand."""

from __future__ import annotations

import agents
import pytest
from agents.models.openai_responses import OpenAIResponsesModel
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from lightning.testing.fake_vllm import Reply, ToolCall

CALL = ToolCall("add", '{"a": 2, "b": 3}', id="call_x")


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@pytest.fixture(autouse=True)
def no_tracing():
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_agents_sdk(house, stream):
    """Its default model class, which sends `strict: true` and its whole history."""
    house.fake.queue(Reply(tool_calls=[CALL]), Reply("it is five"))
    client = await house.client()
    model = OpenAIResponsesModel(model="policy", openai_client=client)
    agent = agents.Agent(name="solver", instructions="be terse", model=model, tools=[agents.function_tool(add)])
    if stream:
        running = agents.Runner.run_streamed(agent, "2 + 3?")
        deltas = [
            event.data.delta
            async for event in running.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == "it is five"
        output = running.final_output
    else:
        output = (await agents.Runner.run(agent, "2 + 3?")).final_output
    assert output == "it is five"
    first, last = await house.transitions()
    assert (first.tool_calls, last.tool_calls) == (("call_x",), ())
    assert first.constrained
    assert last.constrained
    body = house.fake.requests[-1].body
    assert body["tools"][0]["function"]["strict"] is True
    calls = [{"id": "call_x", "type": "function", "function": {"name": "add", "arguments": CALL.arguments}}]
    assert body["messages"] == [
        {"role": "system", "content": "be terse"},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_x", "content": "5"},
    ]


async def talk(model, stream: bool) -> str:
    """One tool call, its result, the answer."""
    bound = model.bind_tools([add])
    messages = [SystemMessage("be terse"), HumanMessage("2 + 3?")]
    if stream:
        said = None
        async for chunk in bound.astream(messages):
            said = chunk if said is None else said + chunk
    else:
        said = await bound.ainvoke(messages)
    (call,) = said.tool_calls
    assert (call["name"], call["args"], call["id"]) == ("add", {"a": 2, "b": 3}, "call_x")
    return (await bound.ainvoke([*messages, said, ToolMessage("5", tool_call_id=call["id"])])).text


def sent_messages(house) -> list[dict]:
    """The last prompt, with arguments and empty contents as every client writes them."""
    messages = [dict(message) for message in house.fake.requests[-1].body["messages"]]
    return [{name: value for name, value in message.items() if value} for message in messages]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_langchain(house, kind, stream):
    house.fake.queue(Reply(tool_calls=[CALL]), Reply("it is five"))
    house.fake.max_model_len = 2048
    llm = await house.llm()
    if kind == "openai":
        model = ChatOpenAI(model="policy", base_url=llm.base_url, api_key=llm.api_key, use_responses_api=True)
    else:
        base_url = llm.base_url.removesuffix("/v1")
        model = ChatAnthropic(model="policy", base_url=base_url, api_key=llm.api_key)  # it asks for thousands of tokens
    assert await talk(model, stream) == "it is five"
    first, last = await house.transitions()
    assert (first.tool_calls, last.tool_calls) == (("call_x",), ())
    assert first.max_tokens_asked == last.max_tokens_asked
    assert (last.max_tokens_asked >= 4096) == (kind == "anthropic")
    assert {request.path for request in house.fake.requests} == {"/v1/chat/completions"}
    calls = [{"id": "call_x", "type": "function", "function": {"name": "add", "arguments": CALL.arguments}}]
    assert sent_messages(house) == [
        {"role": "system", "content": "be terse"},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_x", "content": "5"},
    ]
