"""Streams: teed as they pass, nothing of ours left in them, the end held until the transition is durable."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import openai
import pytest
from lightning.errors import StaleAttemptError, StoreError
from lightning.gateway.http import EventCutter, data_of
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import CallStatus

HI = [{"role": "user", "content": "hi there"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def events_of(payload: bytes) -> list[object]:
    """Each event's JSON without what differs between two calls."""
    found: list[object] = []
    for event in EventCutter().feed(payload):
        data = data_of(event)
        if data == b"[DONE]":
            found.append("[DONE]")
            continue
        chunk = json.loads(data)
        chunk.pop("id", None)
        chunk.pop("created", None)
        found.append(chunk)
    return found


async def test_a_stream_is_recorded_like_a_whole_answer(house):
    client = await house.client()
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == house.fake.default.text
    await client.chat.completions.create(model="policy", messages=HI)
    streamed, plain = await house.transitions()
    assert chunks[0].id == streamed.id == stream.response.headers["x-request-id"]
    assert streamed.response_ids == plain.response_ids
    assert streamed.prompt_ids == plain.prompt_ids
    assert streamed.logprobs == plain.logprobs
    assert (streamed.status, streamed.finish_reason) == (CallStatus.OK, "stop")


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True},
        {"return_token_ids": True},
        {"n": 3},
        {"include_reasoning": True},
        {"include_reasoning": False},
        {"include_reasoning": False, "logprobs": True, "return_token_ids": True},
    ],
)
@pytest.mark.parametrize("chunk_bytes", [0, 7])
async def test_the_agent_sees_the_stream_it_would_see_without_us(house, tools, usage, asked, chunk_bytes):
    """Law 7 for streams: same chunks, in the same order, as vLLM's own stream for the agent's own request."""
    thought = "well then, " if "include_reasoning" in asked else ""
    said = (
        {"tool_calls": [ToolCall("add", '{"a": 1}', id=f"call_{number}") for number in range(2)]}
        if tools
        else {"text": "äh three words"}
    )
    reply = Reply(**said, reasoning=thought)
    body = {"model": "tiny", "messages": HI, "stream": True, **asked}
    if tools:
        body["tools"] = TOOLS
    if usage:
        body["stream_options"] = {"include_usage": True}
    n = asked.get("n", 1)
    house.fake.queue(*[reply] * n, *[Reply(**{**reply.__dict__, "chunk_bytes": chunk_bytes})] * n)
    http = await house.http()
    direct = await http.post(f"{house.fake.url}/v1/chat/completions", json=body)
    ours = await http.post("/chat/completions", json=body)
    assert events_of(ours.content) == events_of(direct.content)
    for step in await house.transitions():
        assert len(step.response_ids) == len(step.logprobs) > 3 + len(thought.split())


async def test_bytes_are_untouched_when_nothing_of_ours_is_inside(house):
    body = {
        "model": "tiny",
        "messages": HI,
        "stream": True,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }
    http = await house.http()
    ours = await http.post("/chat/completions", json=body)
    same_id = {"x-request-id": house.fake.requests[0].request_id}
    direct = await http.post(f"{house.fake.url}/v1/chat/completions", json=body, headers=same_id)
    created = re.compile(rb'"created":[0-9]+')
    assert created.sub(b"", ours.content) == created.sub(b"", direct.content)
    assert b'"prompt_token_ids":[' in ours.content


async def test_tool_call_stream_through_the_openai_client(house):
    house.fake.queue(Reply(tool_calls=[ToolCall("add", '{"a": 1, "b": [2, 3]}', id="call_z")]))
    client = await house.client()
    stream = await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS, stream=True)
    name, arguments, finish = "", "", None
    async for chunk in stream:
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, json.loads(arguments), finish) == ("add", {"a": 1, "b": [2, 3]}, "tool_calls")
    (step,) = await house.transitions()
    assert len(step.response_ids) == len(step.logprobs) > 5


async def test_tokens_arrive_while_vllm_is_still_sampling(house):
    house.fake.pause()
    client = await house.client()
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].delta.role == "assistant"
    assert list(house.fake.in_flight().values()) == [0]
    house.fake.resume()
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == house.fake.default.text


class SlowStore(MemoryStore):
    """A store whose append waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def append(self, transitions):
        self.entered.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return await super().append(transitions)


async def read_until(response: httpx.Response, received: bytearray) -> None:
    async for data in response.aiter_raw():
        received.extend(data)


@pytest.mark.parametrize("usage", [False, True])
async def test_the_last_bytes_leave_after_the_append(build, usage):
    """Law 4: while the store is busy the agent has everything but the end; the end comes when the store is done."""
    store = SlowStore()
    house = await build(store=store)
    http = await house.http()
    body = {"messages": HI, "stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
    received = bytearray()
    async with http.stream("POST", "/chat/completions", json=body) as response:
        reading = asyncio.create_task(read_until(response, received))
        await store.entered.wait()
        await house.until(lambda: b" policy" in received)
        await asyncio.sleep(0.05)
        assert b"[DONE]" not in received
        assert b'"finish_reason":"stop"' not in received
        assert b'"usage"' not in received
        assert not reading.done()
        store.go.set()
        await reading
    assert received.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"stop"' in received
    assert (b'"usage"' in received) == usage


async def test_a_whole_answer_leaves_after_the_append(build):
    store = SlowStore()
    house = await build(store=store)
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await store.entered.wait()
    await asyncio.sleep(0.05)
    assert not asking.done()
    store.go.set()
    await asking
    assert len(await house.transitions()) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(StaleAttemptError("attempt 1 is over"), 409, "stale_attempt"), (StoreError("disk full"), 503, "store_failed")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_store_refuses_is_not_answered(build, error, status, code, stream):
    store = SlowStore()
    store.error = error
    store.go.set()
    house = await build(store=store)
    http = await house.http()
    answer = await http.post("/chat/completions", json={"messages": HI, "stream": stream})
    if stream:
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        said = json.loads(last.removeprefix("data: "))["error"]
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == status
        said = answer.json()["error"]
    assert said["code"] == code
    assert str(error) in said["message"]
    assert await house.transitions() == []


async def test_vllms_error_event_reaches_the_agent(house):
    house.fake.queue(Reply("one two three four", error_after=2, message="engine is dead"))
    client = await house.client()
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="engine is dead"):
        _ = [chunk async for chunk in stream]
    (step,) = await house.recorded()
    assert step.status is CallStatus.ERROR
    assert len(step.response_ids) == 2
