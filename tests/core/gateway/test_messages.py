"""The Messages dialect through the real anthropic client: same prompts as chat, same record, Anthropic's objects and events."""

from __future__ import annotations

import anthropic
import pytest
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import CallStatus

HI = [{"role": "user", "content": "hi there"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "adds", "input_schema": SCHEMA, "strict": True}
SAMPLING = {"temperature": 0.7, "top_k": 5}
TWO = [ToolCall("add", '{"a": 1}', id="call_x"), ToolCall("add", '{"a": 2}', id="call_y")]


async def claude(house, **kwargs) -> anthropic.AsyncAnthropic:
    """An Anthropic client, which adds `/v1` to its base URL itself and sends its key as `x-api-key`."""
    llm = await house.llm()
    made = anthropic.AsyncAnthropic(
        base_url=llm.base_url.removesuffix("/v1"), api_key=llm.api_key, max_retries=0, **kwargs
    )
    return await house.stack.enter_async_context(made)


async def ask(client: anthropic.AsyncAnthropic, stream: bool, **asked):
    """A message, whole or put together from a stream."""
    asked = {"model": "policy", "max_tokens": 64, **asked}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


def chat_body(house, number: int = -1) -> dict:
    """What vLLM was asked, without what the gateway adds."""
    body = dict(house.fake.requests[number].body)
    for name in ("model", "return_token_ids", "logprobs", "top_logprobs", "stream", "stream_options", "max_tokens"):
        body.pop(name, None)
    return body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_answered_and_recorded(house, stream):
    house.fake.queue(Reply("four is it", logprobs=[-0.1, -0.2, -0.3, -0.4]))
    client = await claude(house)
    said = await ask(client, stream, messages=HI, system="be terse", stop_sequences=["\n"], extra_body=SAMPLING)
    assert [block.text for block in said.content] == ["four is it"]
    assert (said.model, said.role, said.stop_reason, said.stop_sequence) == ("tiny", "assistant", "end_turn", None)
    (step,) = await house.transitions()
    assert step.id == said.id == f"msg_{house.fake.requests[0].request_id}"
    assert said.usage.output_tokens == len(step.response_ids) == 4
    assert said.usage.input_tokens == len(step.prompt_ids) > 0
    assert list(step.logprobs) == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert (step.status, step.finish_reason, step.temperature) == (CallStatus.OK, "stop", pytest.approx(0.7))
    assert step.constrained  # top_k
    sent = house.fake.requests[0]
    assert sent.path == "/v1/chat/completions"
    assert sent.body["max_tokens"] == 64
    assert not [name for name in sent.headers if name.startswith(("anthropic-", "x-api-key"))]
    assert chat_body(house) == {
        "messages": [{"role": "system", "content": "be terse"}, *HI],
        **SAMPLING,
        "stop": ["\n"],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_has_the_prompts_it_has_through_chat(house, stream):
    house.fake.queue(Reply(tool_calls=TWO), Reply("three"), Reply(tool_calls=TWO), Reply("three"))
    llm = await house.llm()
    base_url = llm.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=llm.api_key, max_retries=0) as client:
        first = await ask(client, stream, messages=HI, tools=[ADD])
        assert first.stop_reason == "tool_use"
        assert [block.input for block in first.content] == [{"a": 1}, {"a": 2}]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in first.content]
        turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        last = await ask(client, stream, messages=[*HI, *turns], tools=[ADD])
        assert last.content[0].text == "three"

    function = {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
    tools = [{"type": "function", "function": function}]
    openai_client = await house.client(llm)
    answer = await openai_client.chat.completions.create(model="policy", messages=HI, tools=tools)
    calls = [call.model_dump(exclude_none=True) for call in answer.choices[0].message.tool_calls]
    outputs = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in calls]
    history = [*HI, {"role": "assistant", "tool_calls": calls}, *outputs]
    await openai_client.chat.completions.create(model="policy", messages=history, tools=tools)

    steps = await house.transitions()
    assert [step.prompt_ids for step in steps[:2]] == [step.prompt_ids for step in steps[2:]]
    assert [step.response_ids for step in steps[:2]] == [step.response_ids for step in steps[2:]]
    assert [step.tool_calls for step in steps] == [("call_x", "call_y"), (), ("call_x", "call_y"), ()]
    assert steps[0].constrained  # `strict` went on as it was sent


@pytest.mark.parametrize("tools", [[], ["clock"]])
async def test_a_tool_runner_with_a_thread_begins_and_is_told_how_to_go_on(house, tools):
    """Its first request holds the whole conversation; the next would hold only what is new."""

    @anthropic.beta_async_tool
    async def clock() -> str:
        """Say the time."""
        return "12"

    house.fake.queue(*[Reply(tool_calls=[ToolCall("clock", "{}", id="call_x")])] * len(tools), Reply("noon"))
    client = await claude(house)
    asked = {"model": "policy", "max_tokens": 64, "messages": HI, "tools": [clock]}
    if tools:
        with pytest.raises(anthropic.APIStatusError, match=r"thread=False"):
            await client.beta.messages.tool_runner(**asked).until_done()
        assert [step.status for step in await house.transitions()] == [CallStatus.OK, CallStatus.REFUSED]
    else:
        answer = await client.beta.messages.tool_runner(**asked).until_done()
        assert answer.content[0].text == "noon"


async def test_a_tool_runner_without_a_thread_runs(house):
    @anthropic.beta_async_tool
    async def clock() -> str:
        """Say the time."""
        return "12"

    house.fake.queue(Reply(tool_calls=[ToolCall("clock", "{}", id="call_x")]), Reply("noon"))
    client = await claude(house)
    asked = {"model": "policy", "max_tokens": 64, "messages": HI, "tools": [clock]}
    answer = await client.beta.messages.tool_runner(**asked, thread=False).until_done()
    assert answer.content[0].text == "noon"


async def test_tokens_are_counted_as_they_would_be_sent(house):
    client = await claude(house)
    asked = {"model": "policy", "messages": HI, "system": "be terse", "tools": [ADD]}
    counted = await client.messages.count_tokens(**asked)
    said = await client.messages.create(**asked, max_tokens=5)
    assert counted.input_tokens == said.usage.input_tokens
    assert len(await house.transitions()) == 1
    with pytest.raises(anthropic.UnprocessableEntityError, match="mcp_servers"):
        await client.messages.count_tokens(**asked, extra_body={"mcp_servers": [{}]})


async def test_errors_have_anthropics_shape(house):
    client = await claude(house)
    house.fake.queue(Reply(status=400, message="top_p must be in (0, 1]"))
    with pytest.raises(anthropic.BadRequestError, match="top_p must be in") as caught:
        await ask(client, False, messages=HI, extra_body={"top_p": 7})
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "top_p must be in (0, 1]"},
    }
    house.fake.queue(Reply("one two three four", error_after=2, message="engine is dead"))
    with pytest.raises(anthropic.APIStatusError, match="engine is dead"):
        await ask(client, True, messages=HI)
    refused, step = await house.recorded(2)
    assert (refused.status, refused.error) == (CallStatus.REFUSED, "top_p must be in (0, 1]")
    assert (step.status, len(step.response_ids)) == (CallStatus.ERROR, 2)
    with pytest.raises(anthropic.AuthenticationError, match="not one of this gateway"):
        await ask(client.with_options(api_key="sk-ant-wrong"), False, messages=HI)


async def test_the_wrong_base_url_is_told_from_the_right_one(house):
    llm = await house.llm()
    async with anthropic.AsyncAnthropic(base_url=llm.base_url, api_key=llm.api_key) as client:
        with pytest.raises(anthropic.NotFoundError, match="give them the base URL without it"):
            await ask(client, False, messages=HI)
