"""Plain calls through the real openai client: what the agent sees, what vLLM gets, what is recorded."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import Caller, CallStatus, VersionRun

HI = [{"role": "user", "content": "hi there"}]


async def test_chat_is_answered_and_recorded(house):
    house.fake.queue(Reply("four is it", logprobs=[-0.1, -0.2, -0.3, -0.4]))
    client = await house.client()
    raw = await client.chat.completions.with_raw_response.create(model="policy", messages=HI, temperature=0.7)
    answer = raw.parse()
    assert answer.choices[0].message.content == "four is it"
    (step,) = await house.transitions()
    sent = house.fake.requests[0]
    assert step.id == answer.id == raw.headers["x-request-id"] == f"chatcmpl-{sent.request_id}"
    assert len(step.response_ids) == 4
    assert list(step.logprobs) == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert len(step.prompt_ids) > 0
    assert (step.seq, step.status, step.finish_reason, step.choice) == (0, CallStatus.OK, "stop", 0)
    assert (step.temperature, step.constrained, step.caller) == (pytest.approx(0.7), False, Caller("agent"))
    assert step.versions == (VersionRun(0, 0),)
    assert step.started_at <= step.ended_at
    assert sent.body["model"] == "tiny"
    assert sent.body["temperature"] == 0.7


async def test_ids_are_exactly_the_ones_vllm_returned(house):
    house.fake.queue(Reply("x", token_ids=[9, 8, 7], logprobs=[-1.0, -2.0, -3.0]))
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI)
    (step,) = await house.transitions()
    assert list(step.response_ids) == [9, 8, 7]


async def test_the_agent_sees_what_it_would_see_without_us(house):
    """Law 7, whole answers: the body equals vLLM's own answer to the agent's own request, but for id and time."""
    llm = await house.llm()
    house.fake.default = Reply("four", reasoning="two and two")
    async with httpx.AsyncClient() as http:
        for asked in (
            {},
            {"logprobs": True},
            {"logprobs": True, "top_logprobs": 0, "return_token_ids": True},
            {"return_token_ids": True},
            {"n": 2, "logprobs": True, "top_logprobs": None},
            {"include_reasoning": False},
            {"include_reasoning": False, "logprobs": True, "return_token_ids": True},
        ):
            body = {"model": "tiny", "messages": HI, **asked}
            direct = (await http.post(f"{house.fake.url}/v1/chat/completions", json=body)).json()
            headers = {"authorization": f"Bearer {llm.api_key}"}
            ours = (await http.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)).json()
            for answer in (direct, ours):
                assert answer.pop("id").startswith("chatcmpl-")
                del answer["created"]
            assert ours == direct
    assert [len(step.response_ids) for step in await house.transitions()] == [5] * 8


async def test_unknown_fields_and_tools_pass_through_untouched(house):
    client = await house.client()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "x-strange": [1, "é"]}}]
    extra = {"chat_template_kwargs": {"deep": {"er": None}}, "seed": 7, "brand_new": [1.5, None]}
    await client.chat.completions.create(
        model="anything", messages=HI, tools=tools, tool_choice="auto", stop=["\n"], extra_body=extra
    )
    body = house.fake.requests[0].body
    assert body["tools"] == tools
    assert body["tool_choice"] == "auto"
    assert body["stop"] == ["\n"]
    assert {name: body[name] for name in extra} == extra
    assert set(body) == {
        "model", "messages", "tools", "tool_choice", "stop", *extra, "return_token_ids", "logprobs", "top_logprobs",
    }  # fmt: skip


async def test_credentials_and_our_headers_stop_at_the_gateway(house):
    llm = await house.llm()
    http = await house.http(llm)
    headers = {
        "x-lightning-caller": '{"agent": "a"}',
        "x-lightning-rollout": llm.api_key,
        "cookie": "a=b",
        "traceparent": "00-1-2-01",
        "x-request-id": "chosen-by-the-agent",
    }
    await http.post("/chat/completions", json={"messages": HI}, headers=headers)
    sent = house.fake.requests[0].headers
    assert sent["traceparent"] == "00-1-2-01"
    assert sent["x-request-id"] != "chosen-by-the-agent"
    assert llm.api_key not in json.dumps(dict(sent))
    assert not {"authorization", "cookie"} & set(sent)
    assert not [name for name in sent if name.startswith("x-lightning")]


async def test_tool_calls_come_back(house):
    house.fake.queue(Reply(tool_calls=[ToolCall("add", '{"a": 1}')]))
    client = await house.client()
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = await client.chat.completions.create(model="policy", messages=HI, tools=tools)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    (step,) = await house.transitions()
    assert step.finish_reason == "tool_calls"
    assert len(step.response_ids) == len(step.logprobs) > 3


async def test_every_choice_is_a_transition(house):
    house.fake.queue(Reply("one"), Reply("two two"), Reply("three three three"))
    client = await house.client()
    answer = await client.chat.completions.create(model="policy", messages=HI, n=3)
    steps = await house.transitions()
    assert [step.choice for step in steps] == [0, 1, 2]
    assert [step.seq for step in steps] == [0, 1, 2]
    assert {step.id for step in steps} == {answer.id}
    assert [len(step.response_ids) for step in steps] == [2, 3, 4]
    assert len({bytes(step.prompt_ids) for step in steps}) == 1


async def test_parallel_calls_with_one_prompt_are_as_many_transitions(house):
    client = await house.client()
    calls = (client.chat.completions.create(model="policy", messages=HI) for _ in range(3))
    answers = await asyncio.gather(*calls)
    steps = await house.transitions()
    assert sorted(step.id for step in steps) == sorted(answer.id for answer in answers)
    assert [step.seq for step in steps] == [0, 1, 2]


async def test_completions_with_text_and_with_ids(house):
    client = await house.client()
    answer = await client.completions.create(model="policy", prompt="once upon")
    assert answer.choices[0].text == house.fake.default.text
    assert answer.choices[0].logprobs is None
    await client.completions.create(model="policy", prompt=[5, 6, 7], logprobs=0)
    first, second = await house.transitions()
    assert first.id == answer.id
    assert first.id.startswith("cmpl-")
    assert list(second.prompt_ids) == [5, 6, 7]
    assert len(second.logprobs) == len(second.response_ids)


async def test_several_prompts_are_several_transitions_with_their_own_prompt(house):
    client = await house.client()
    answer = await client.completions.create(model="policy", prompt=[[5, 6], [7, 8, 9]], n=2)
    assert len(answer.choices) == 4
    steps = await house.transitions()
    assert [list(step.prompt_ids) for step in steps] == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
    assert [step.choice for step in steps] == [0, 1, 2, 3]


async def test_echo_is_not_touched(house):
    client = await house.client()
    await client.completions.create(model="policy", prompt="once", echo=True)
    assert "return_token_ids" not in house.fake.requests[0].body
    (step,) = await house.transitions()
    assert not step.response_ids


@pytest.mark.parametrize(
    ("asked", "token", "config", "sent"),
    [
        ({"temperature": 0.3}, None, {}, 0.3),
        ({}, None, {}, None),
        ({"temperature": 0.3}, {"temperature": 0.5}, {}, 0.5),
        ({"temperature": 0.3}, None, {"temperature": 0.9}, 0.9),
        ({"temperature": 0.3}, {"temperature": 0.5}, {"temperature": 0.9}, 0.5),
    ],
)
async def test_who_decides_on_sampling(build, asked, token, config, sent):
    house = await build(override_sampling=config)
    client = await house.client(await house.llm(sampling=token))
    await client.chat.completions.create(model="policy", messages=HI, **asked)
    assert house.fake.requests[0].body.get("temperature") == sent
    (step,) = await house.transitions()
    assert step.temperature == pytest.approx(1.0 if sent is None else sent)


async def test_overriding_one_name_of_the_token_limit_removes_the_other(build):
    house = await build(override_sampling={"max_tokens": 5})
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI, max_completion_tokens=500)
    body = house.fake.requests[0].body
    assert body["max_tokens"] == 5
    assert "max_completion_tokens" not in body


async def test_vllms_own_refusal_is_passed_through(house):
    house.fake.queue(Reply(status=400, message="top_p must be in (0, 1]"))
    client = await house.client()
    with pytest.raises(openai.BadRequestError, match="top_p must be in"):
        await client.chat.completions.create(model="policy", messages=HI, top_p=7)
    assert await house.transitions() == []


async def test_missing_logprobs_leave_none_rather_than_wrong_ones(house):
    raw = {
        "id": "chatcmpl-x",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a"},
                "finish_reason": "stop",
                "token_ids": [4, 5],
                "logprobs": {"content": [{"token": "a", "logprob": -1.0}]},
            }
        ],
    }
    house.fake.queue(Reply(raw=json.dumps(raw).encode()))
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI)
    (step,) = await house.transitions()
    assert list(step.response_ids) == [4, 5]
    assert not step.logprobs


async def test_sync_client_in_a_thread(house):
    llm = await house.llm()

    def ask() -> str:
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            return client.chat.completions.create(model="policy", messages=HI).choices[0].message.content

    assert await asyncio.to_thread(ask) == house.fake.default.text


async def test_url_with_token_needs_no_key(house):
    llm = await house.llm()
    async with openai.AsyncOpenAI(base_url=llm.url_with_token, api_key="none") as client:
        await client.chat.completions.create(model="policy", messages=HI)
        await client.models.list()
    assert len(await house.transitions()) == 1


async def test_models_lists_the_policy(house):
    client = await house.client()
    (card,) = (await client.models.list()).data
    assert card.id == "policy"
    assert card.max_model_len == 2048


async def test_health_needs_no_token_and_tells_the_version(build):
    house = await build(version=3)
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{house.gateway.url}/health")
    assert answer.status_code == 200
    assert answer.json()["policy_version"] == 3


async def test_large_bodies_and_odd_text(house):
    """More than aiohttp takes in one piece, and a lone surrogate, which Python's JSON sends and vLLM takes."""
    http = await house.http()
    text = "x" * 1_500_000
    payload = json.dumps({"messages": [{"role": "user", "content": text + "\ud800"}]}).encode()
    answer = await http.post("/chat/completions", content=payload)
    assert answer.status_code == 200
    assert house.fake.requests[0].body["messages"][0]["content"] == text + "\ud800"


NUMBERS = [2**63, 2**64, -(2**63) - 1, 10**30]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_numbers_of_any_length_reach_the_model_as_they_were_sent(house, path):
    """In tools' schemas, and in what a tool was called with."""
    http = await house.http()
    schema = {"type": "object", "properties": {"id": {"type": "integer", "enum": NUMBERS}}}
    function = {"name": "look", "parameters": schema}
    called = {"type": "tool_use", "id": "c", "name": "look", "input": {"ids": NUMBERS}}
    asked = {
        "chat/completions": {"messages": HI, "tools": [{"type": "function", "function": function}]},
        "responses": {"input": "hi", "tools": [{"type": "function", **function}]},
        "messages": {
            "messages": [*HI, {"role": "assistant", "content": [called]}, *HI],
            "tools": [{"name": "look", "input_schema": schema}],
            "max_tokens": 5,
        },
    }
    assert (await http.post(f"/{path}", json=asked[path])).status_code == 200
    sent = house.fake.requests[0].body
    assert sent["tools"][0]["function"]["parameters"] == schema
    if path == "messages":
        assert json.loads(sent["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"ids": NUMBERS}


async def test_a_call_without_ids_is_answered_and_said_once(house, caplog):
    message = {"role": "assistant", "content": "four"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": None, "logprobs": None}
    client = await house.client()
    await client.completions.create(model="policy", prompt="once", echo=True)
    await client.chat.completions.create(model="policy", messages=HI)
    assert not caplog.records, "ids that were not asked for, or that came, are not missing"
    house.fake.default = Reply(raw=json.dumps({"id": "x", "choices": [choice], "prompt_token_ids": [1, 2]}).encode())
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=HI)
        assert answer.choices[0].message.content == "four"
    (said,) = [record.message for record in caplog.records]
    assert "x is not trained on: the policy server gave no token ids" in said
