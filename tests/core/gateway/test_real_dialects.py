"""One conversation through chat, Responses and Messages before a real vLLM: one prompt, one answer, token for token."""

from __future__ import annotations

import json

import anthropic
import httpx
import openai
import pytest
from lightning.gateway import Upstream
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.testing.tiny_models import make_tiny_tokenizer
from lightning.testing.vllm_replies import NO_TEXT
from lightning.types import LLM, CallStatus

pytestmark = pytest.mark.slow

SYSTEM, QUESTION, ARGUMENTS, RESULT = "You are terse.", "What is 12 + 30?", {"expression": "12 + 30"}, "42"
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "calculates", "parameters": SCHEMA}
TOKENS = 24
SEEDS = {"seed": 5}
LAST = {"response.completed", "response.incomplete"}
ONE = {"type": "object", "properties": {"expression": {"enum": ["12 + 30"]}}, "required": ["expression"]}
FORCED = {"name": "calculator", "strict": True}
JSON = {"content-type": "application/json"}


@pytest.fixture
def vllm(served) -> OwnedVLLM:
    return served.vllm


@pytest.fixture
async def real(build, vllm):
    return await build(upstreams=[Upstream(vllm.url, vllm.model)], version=vllm.version)


def chat_request(**more) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": json.dumps(ARGUMENTS)}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": RESULT, "tool_call_id": "call_1"},
    ]
    tools = [{"type": "function", "function": CALCULATOR}]
    return {"messages": messages, "tools": tools, "max_tokens": TOKENS, **more}


def responses_request(**more) -> dict:
    text = {"type": "output_text", "text": "Let me see.", "annotations": []}
    items = [
        {"role": "user", "content": QUESTION},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text]},
        {"type": "function_call", "call_id": "call_1", "name": "calculator", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
    ]
    tools = [{"type": "function", **CALCULATOR}]
    return {"instructions": SYSTEM, "input": items, "tools": tools, "max_output_tokens": TOKENS, **more}


def messages_request(**more) -> dict:
    blocks = [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_1", "name": "calculator", "input": ARGUMENTS},
    ]
    result = [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": RESULT}]}]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": result},
    ]
    tools = [{"name": "calculator", "description": "calculates", "input_schema": SCHEMA}]
    return {"system": SYSTEM, "messages": messages, "tools": tools, "max_tokens": TOKENS, **more}


async def through_all(llm: LLM) -> list[str]:
    """The conversation six times: three dialects, whole and streamed. Returns the texts of the answers."""
    texts: list[str] = []
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", **chat_request(**SEEDS))
        texts.append(answer.choices[0].message.content)
        stream = await client.chat.completions.create(model="policy", stream=True, **chat_request(**SEEDS))
        texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
        response = await client.responses.create(model="policy", extra_body=SEEDS, **responses_request())
        texts.append(response.output_text)
        events = await client.responses.create(model="policy", stream=True, extra_body=SEEDS, **responses_request())
        said = [event.response.output_text async for event in events if event.type in LAST]
        texts += said
    root = llm.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=llm.api_key, max_retries=0) as client:
        message = await client.messages.create(model="policy", extra_body=SEEDS, **messages_request())
        texts.append(message.content[0].text)
        async with client.messages.stream(model="policy", extra_body=SEEDS, **messages_request()) as events:
            texts.append((await events.get_final_message()).content[0].text)
    return texts


async def test_one_conversation_is_the_same_through_every_dialect(real, vllm):
    """Also the same as vLLM's own: its chat endpoint's ids, its Responses prompt, its count for Messages."""
    texts = await through_all(await real.llm())
    steps = await real.transitions()
    assert len(steps) == 6
    assert len(set(texts)) == 1
    assert len({bytes(step.prompt_ids) for step in steps}) == 1
    assert len({bytes(step.response_ids) for step in steps}) == 1
    for step in steps:
        assert step.status is CallStatus.OK
        assert len(step.response_ids) == len(step.logprobs) > 0
        assert list(step.logprobs) == pytest.approx(list(steps[0].logprobs), abs=1e-4)
        assert not step.constrained
    async with httpx.AsyncClient(base_url=vllm.url, timeout=120) as http:
        own = {"model": vllm.model}
        asked = chat_request(**SEEDS, **own, return_token_ids=True)
        chat = (await http.post("/v1/chat/completions", json=asked)).json()
        asked = responses_request(**SEEDS, **own, enable_response_messages=True)
        response = (await http.post("/v1/responses", json=asked)).json()
        message = (await http.post("/v1/messages", json=messages_request(**own))).json()
    assert list(steps[0].prompt_ids) == chat["prompt_token_ids"] == response["input_messages"][0]["tokens"]
    assert list(steps[0].response_ids) == chat["choices"][0]["token_ids"]
    counted = [message["usage"].get(f"{part}input_tokens", 0) for part in ("", "cache_read_", "cache_creation_")]
    assert sum(counted) == len(steps[0].prompt_ids)


@pytest.mark.parametrize("path", ["responses", "messages"])
async def test_ids_are_the_engines_where_the_text_would_give_others(real, vllm, path):
    """An untrained model says what no tokenizer would have cut so; the record has what it said."""
    tokenizer = make_tiny_tokenizer()
    http = await real.http()
    async with httpx.AsyncClient(base_url=vllm.url, timeout=120) as direct:
        for seed in range(20):
            ask = responses_request if path == "responses" else messages_request
            answer = (await http.post(f"/{path}", json=ask(seed=seed), timeout=120)).json()
            text = (answer["output"][0] if path == "responses" else answer)["content"][0]["text"]
            body = {"model": vllm.model, **chat_request(seed=seed), "return_token_ids": True}
            said = (await direct.post("/v1/chat/completions", json=body)).json()["choices"][0]
            assert text == said["message"]["content"]
            step = (await real.transitions())[seed]
            assert list(step.response_ids) == said["token_ids"]
            if tokenizer.encode(text).ids != said["token_ids"][: -1 if said["finish_reason"] == "stop" else None]:
                return
    pytest.fail("no sample retokenised differently, which an untrained model's nearly always do")


async def test_a_forced_tool_call_is_the_same_through_every_dialect(real):
    llm = await real.llm()
    http = await real.http(llm)
    function = {**FORCED, "parameters": ONE}
    bodies = {
        "chat/completions": chat_request(
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "calculator"}},
        ),
        "responses": responses_request(
            tools=[{"type": "function", **function}], tool_choice={"type": "function", "name": "calculator"}
        ),
        "messages": messages_request(
            tools=[{**FORCED, "input_schema": ONE}], tool_choice={"type": "tool", "name": "calculator"}
        ),
    }
    limits = {"chat/completions": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}

    async def ask(path: str, seed: int, stream: bool) -> httpx.Response:
        body = {**bodies[path], "seed": seed, limits[path]: 100, "stream": stream}
        answer = await http.post(f"/{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer

    for seed in range(20):  # the grammar allows white space without end, which an untrained model may like
        choice = (await ask("chat/completions", seed, False)).json()["choices"][0]
        if choice["finish_reason"] != "length":
            break
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "calculator"
    before = len(await real.transitions())
    for path in bodies:
        for stream in (False, True):
            assert "calculator" in (await ask(path, seed, stream)).text
    steps = (await real.transitions())[before:]
    assert len(steps) == 6
    assert len({bytes(step.prompt_ids) + bytes(step.response_ids) for step in steps}) == 1
    assert all(step.constrained for step in steps)
    assert {len(step.tool_calls) for step in steps} == {len(choice["message"]["tool_calls"])}
    assert len({step.tool_calls[0] for step in steps}) == 6


LATER = [{"role": "user", "content": QUESTION}, {"role": "system", "content": "Now."}, {"role": "user", "content": "?"}]
FOUND = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": RESULT}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "calculator", "input": ARGUMENTS}]}


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": LATER},
        {"messages": LATER, "thinking": {"type": "disabled"}},
        {"messages": [*LATER, USED, {"role": "user", "content": [FOUND]}], "system": SYSTEM},
    ],
    ids=["system later", "without thinking", "results"],
)
async def test_messages_have_the_prompt_of_vllms_own_endpoint(real, vllm, asked):
    asked = {"max_tokens": 4, **asked}
    http = await real.http()
    answer = await http.post("/messages", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    (step,) = await real.transitions()
    counted = (await http.post("/messages/count_tokens", json=asked, timeout=120)).json()
    async with httpx.AsyncClient(base_url=vllm.url, timeout=120) as direct:
        own = await direct.post("/v1/messages", json={"model": vllm.model, **asked})
        assert own.status_code == 200, own.text
        usage = own.json()["usage"]
    total = sum(usage.get(f"{part}input_tokens", 0) for part in ("", "cache_read_", "cache_creation_"))
    assert len(step.prompt_ids) == counted["input_tokens"] == total


async def test_vllm_refuses_half_a_character_as_its_double_does(vllm):
    said = {"model": vllm.model, "messages": [{"role": "user", "content": "half \ud83d"}], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=vllm.url, timeout=120) as direct:
        reply = await direct.post("/v1/chat/completions", content=json.dumps(said), headers=JSON)
    assert (reply.status_code, NO_TEXT in reply.text) == (400, True), reply.text
