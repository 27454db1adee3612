"""The Responses dialect through the real openai client: same prompts as chat, same record, OpenAI's objects and events."""

from __future__ import annotations

import json

import openai
import pytest
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import CallStatus

HI = [{"role": "user", "content": "hi there"}]
ADD = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
TWO = [ToolCall("add", '{"a": 1}', id="call_x"), ToolCall("add", '{"a": 2}', id="call_y")]


async def ask(client: openai.AsyncOpenAI, stream: bool, **asked):
    """A response, whole or the last event's."""
    if not stream:
        return await client.responses.create(model="policy", **asked)
    async with client.responses.stream(model="policy", **asked) as events:
        return await events.get_final_response()


def chat_body(house, number: int = -1) -> dict:
    """What vLLM was asked, without what the gateway adds."""
    body = dict(house.fake.requests[number].body)
    for name in ("model", "return_token_ids", "logprobs", "top_logprobs", "stream", "stream_options"):
        body.pop(name, None)
    return body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_answered_and_recorded(house, stream):
    house.fake.queue(Reply("four is it", logprobs=[-0.1, -0.2, -0.3, -0.4]))
    client = await house.client()
    said = await ask(client, stream, input="hi there", instructions="be terse", temperature=0.7, max_output_tokens=9)
    assert said.output_text == "four is it"
    assert (said.status, said.model, said.temperature, said.max_output_tokens) == ("completed", "tiny", 0.7, 9)
    (step,) = await house.transitions()
    assert step.id == said.id == f"resp_{house.fake.requests[0].request_id}"
    assert said.usage.output_tokens == len(step.response_ids) == 4
    assert said.usage.input_tokens == len(step.prompt_ids) > 0
    assert list(step.logprobs) == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert (step.status, step.finish_reason, step.temperature) == (CallStatus.OK, "stop", pytest.approx(0.7))
    assert house.fake.requests[0].path == "/v1/chat/completions"
    assert chat_body(house) == {
        "messages": [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hi there"}],
        "temperature": 0.7,
        "max_completion_tokens": 9,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_has_the_prompts_it_has_through_chat(house, stream):
    house.fake.queue(Reply(tool_calls=TWO), Reply("three"), Reply(tool_calls=TWO), Reply("three"))
    client = await house.client()
    first = await ask(client, stream, input=HI, tools=[ADD])
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in first.output]
    items = [
        item.model_dump(exclude_none=True, include={"type", "call_id", "name", "arguments"}) for item in first.output
    ]
    last = await ask(client, stream, input=[*HI, *items, *results], tools=[ADD])
    assert last.output_text == "three"

    function = {name: value for name, value in ADD.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    answer = await client.chat.completions.create(model="policy", messages=HI, tools=tools)
    message = answer.choices[0].message.model_dump(include={"role", "tool_calls"})
    outputs = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in message["tool_calls"]]
    await client.chat.completions.create(model="policy", messages=[*HI, message, *outputs], tools=tools)

    steps = await house.transitions()
    assert [step.prompt_ids for step in steps[:2]] == [step.prompt_ids for step in steps[2:]]
    assert [step.response_ids for step in steps[:2]] == [step.response_ids for step in steps[2:]]
    assert [call.call_id for call in first.output] == ["call_x", "call_y"] == list(steps[0].tool_calls)
    assert [step.tool_calls for step in steps] == [("call_x", "call_y"), (), ("call_x", "call_y"), ()]
    assert steps[0].constrained  # `strict` went on as it was sent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_previous_response_stands_for_the_whole_conversation(house, stream):
    house.fake.queue(Reply(tool_calls=TWO), Reply("three"), Reply("bye"))
    client = await house.client()
    first = await ask(client, stream, input="hi there", instructions="one", tools=[ADD])
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in first.output]
    second = await ask(client, stream, input=results, instructions="two", previous_response_id=first.id)
    await ask(client, stream, input="thanks", previous_response_id=second.id)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.arguments}} for call in TWO
    ]
    before = [
        *HI,
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": "3", "tool_call_id": call.id} for call in TWO),
    ]
    assert chat_body(house, 1)["messages"] == [{"role": "system", "content": "two"}, *before]
    after = [{"role": "assistant", "content": "three"}, {"role": "user", "content": "thanks"}]
    assert chat_body(house, 2)["messages"] == [*before, *after]


async def test_only_the_attempt_itself_finds_its_stored_responses(house):
    client, other = await house.client(), await house.client()
    kept = await client.responses.create(model="policy", input="a")
    gone = await client.responses.create(model="policy", input="a", store=False)
    for who, response in ((other, kept), (client, gone)):
        with pytest.raises(openai.NotFoundError, match="Send the whole conversation as input") as caught:
            await who.responses.create(model="policy", input="b", previous_response_id=response.id)
        assert caught.value.param == "previous_response_id"


async def test_errors_of_vllm_have_openais_shape(house):
    house.fake.queue(Reply(status=400, message="top_p must be in (0, 1]"))
    client = await house.client()
    with pytest.raises(openai.BadRequestError, match="top_p must be in"):
        await client.responses.create(model="policy", input="x", top_p=7)
    house.fake.queue(Reply("one two three four", error_after=2, message="engine is dead"))
    with pytest.raises(openai.APIError, match="engine is dead"):
        await ask(client, True, input="x")
    refused, step = await house.recorded(2)
    assert (refused.status, refused.error) == (CallStatus.REFUSED, "top_p must be in (0, 1]")
    assert (step.status, len(step.response_ids)) == (CallStatus.ERROR, 2)


def events(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def test_events_are_numbered_and_named(house):
    http = await house.http()
    answer = await http.post("/responses", json={"input": "x", "stream": True})
    said = events(answer.text)
    assert [item["sequence_number"] for item in said] == list(range(len(said)))
    assert [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")] == [
        item["type"] for item in said
    ]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in answer.text


async def test_an_answer_of_another_shape_is_a_fault_of_the_policy_server(house):
    raw = {
        "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"total_tokens": 1},
    }
    house.fake.queue(Reply(raw=json.dumps(raw).encode()))
    http = await house.http()
    answer = await http.post("/responses", json={"input": "x"})
    assert answer.status_code == 502
    (step,) = await house.recorded()
    assert step.status is CallStatus.ERROR
