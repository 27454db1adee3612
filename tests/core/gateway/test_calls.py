"""Plain calls through the real openai client: what the agent sees, what vLLM gets, what is recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from array import array

import httpx
import openai
import pytest
from lightning.gateway.http import CURE_OF_LENGTH, CURE_OF_TOOLS, RefusalError, read_object
from lightning.runner.attempt_completion import judge
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import TOO_LONG, Caller, CallStatus, Fault, Outcome, VersionRun

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
    ours = ["x-lightning-logprobs", "x-lightning-token-ids"]
    assert [name for name in sent if name.startswith("x-lightning")] == ours, "ours, to vLLM"


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


def contents(answer: httpx.Response) -> list[dict]:
    """An answer, or a stream's chunks, without what differs between two calls."""
    events = answer.text.split("\n\n") if answer.text.startswith("data:") else [f"data: {answer.text}"]
    found = [json.loads(event[6:]) for event in events if event and "[DONE]" not in event]
    return [{name: value for name, value in item.items() if name not in {"id", "created"}} for item in found]


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
    (step,) = await house.transitions()
    assert (step.status, step.error, len(step.response_ids)) == (CallStatus.REFUSED, "top_p must be in (0, 1]", 0)


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
    assert card.max_model_len == 131_072


async def test_health_needs_no_token_and_tells_the_version(build):
    house = await build(version=3)
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{house.gateway.url}/health")
    assert answer.status_code == 200
    assert answer.json()["policy_version"] == 3


async def test_large_bodies(house):
    """More than aiohttp takes in one piece."""
    http = await house.http()
    text = "x" * 1_500_000
    answer = await http.post("/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert answer.status_code == 200
    assert house.fake.requests[0].body["messages"][0]["content"] == text


HALF = "half \ud83d"
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {HALF: {}}}}


@pytest.mark.parametrize(
    ("path", "asked", "where"),
    [
        ("chat/completions", {"messages": [*HI, {"role": "user", "content": HALF}]}, "messages[1].content"),
        ("chat/completions", {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
         "tools[0].function.parameters.properties"),
        ("chat/completions", {"messages": HI, "stop": ["a", HALF]}, "stop[1]"),
        ("completions", {"prompt": ["a", HALF]}, "prompt[1]"),
        ("responses", {"input": HALF}, "input"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}], "max_tokens": 5},
         "messages[0].content[0].text"),
        ("messages/count_tokens", {"messages": HI, "system": HALF}, "system"),
    ],
)  # fmt: skip
async def test_half_a_character_is_refused_where_it_stands(house, path, asked, where):
    """As vLLM refuses it, which says neither where nor why: no tokenizer takes it."""
    http = await house.http()
    for encoding in ("ascii", "utf-8"):  # as an escape, and as bytes
        payload = json.dumps(asked, ensure_ascii=encoding == "ascii").encode("utf-8", "surrogatepass")
        answer = await http.post(f"/{path}", content=payload, headers={"content-type": "application/json"})
        message = answer.json()["error"]["message"]
        assert (answer.status_code, message.partition(" has half of a character")[0]) == (422, repr(where)), message
        assert "(the lone surrogate \\ud83d)" in message
        assert "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')" in message
    assert not house.fake.requests


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"k" * 20_000: [1] * 40_000 + [HALF]}, "k" * 200 + "…"),
        ({"a": [1, {"b": {}}, [[]]], "c": [{"d": [HALF]}]}, "c[0].d[0]"),
        ({"a": 1, HALF: 2}, "body"),
        ({"": HALF}, "body"),
        (HALF, "body"),
    ],
    ids=["a long name", "after others", "in a name", "no name", "a text"],
)
def test_where_half_a_character_stands_is_told_in_little_memory(asked, where):
    payload = json.dumps(asked).encode()
    tracemalloc.start()
    with pytest.raises(RefusalError) as caught:
        read_object(payload)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (caught.value.param, str(caught.value).startswith(repr(where))) == (where, True)
    assert most < 4_000_000


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
    await client.chat.completions.create(model="policy", messages=HI)
    assert not caplog.records, "ids that came are not missing"
    house.fake.default = Reply(raw=json.dumps({"id": "x", "choices": [choice], "prompt_token_ids": [1, 2]}).encode())
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=HI)
        assert answer.choices[0].message.content == "four"
    (said,) = [record.message for record in caplog.records]
    assert "is not trained on: the policy server gave no token ids" in said


@pytest.mark.parametrize("stream", [False, True])
async def test_packed_logprobs_are_those_of_json_and_the_agent_sees_neither(house, stream, caplog):
    """A vLLM without the middleware is understood, and said once."""
    await packed_is_json_and_unseen(house, "chat/completions", stream, caplog)


async def packed_is_json_and_unseen(house, path, stream, caplog):
    caplog.set_level(logging.INFO, "lightning.gateway.calls")
    http = await house.http()
    asked = {"model": "policy", "messages": HI, "prompt": "once", "n": 2, "stream": stream}
    shown = []
    for house.fake.packs in (True, False, False):
        house.fake.queue(Reply("a b", logprobs=[-0.1, -1e5, -7.25]), Reply("c", logprobs=[-3.3, 0.0]))
        answer = await http.post(f"/{path}", json=asked)
        assert "packed" not in answer.text
        shown.append(contents(answer))
    assert shown[0] == shown[1]
    steps = await house.transitions()
    packed, plain = ([list(step.logprobs) for step in steps[start : start + 2]] for start in (0, 2))
    assert packed == plain == [list(array("f", [-0.1, -9999.0, -7.25])), list(array("f", [-3.3, 0.0]))]
    assert len([line for line in caplog.messages if "PackedLogprobs" in line]) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_prompts_ids_are_packed_unless_the_agent_gets_them(house, stream, keeps):
    """Recorded alike from a vLLM that packs them and from one that does not; the agent sees numbers or nothing."""
    http = await house.http()
    asked = {"model": "policy", "messages": HI, "stream": stream, "return_token_ids": keeps}
    shown = []
    for house.fake.packs in (True, False):
        house.fake.queue(Reply("a b"))
        shown.append(contents(await http.post("/chat/completions", json=asked))[0]["prompt_token_ids"])
    assert ("x-lightning-token-ids" in house.fake.requests[0].headers) is not keeps
    packed, plain = [list(step.prompt_ids) for step in await house.transitions()]
    assert packed == plain
    assert packed
    assert shown == [packed, packed] if keeps else [None, None]


@pytest.mark.parametrize("ids", ["ab", "\ud800"])
async def test_packed_ids_that_are_none_are_a_502(house, ids):
    choice = {"index": 0, "message": {"content": "x"}, "token_ids": [1]}
    house.fake.queue(Reply(raw=json.dumps({"id": "x", "choices": [choice], "prompt_token_ids": ids}).encode()))
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match="not shaped like vLLM"):
        await client.chat.completions.create(model="policy", messages=HI)


async def test_logprobs_that_the_agent_asked_for_are_not_packed(house):
    client = await house.client()
    answer = await client.chat.completions.create(model="policy", messages=HI, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == 6
    assert "x-lightning-logprobs" not in house.fake.requests[0].headers
    (step,) = await house.transitions()
    assert len(step.logprobs) == 6


@pytest.mark.parametrize("packed", ["!", "AAAA", 4])
async def test_packed_logprobs_that_are_none_are_a_502(house, packed):
    choice = {"index": 0, "message": {"content": "x"}, "token_ids": [1], "logprobs": {"packed": packed}}
    house.fake.queue(Reply(raw=json.dumps({"id": "x", "choices": [choice], "prompt_token_ids": [1]}).encode()))
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match="not shaped like vLLM"):
        await client.chat.completions.create(model="policy", messages=HI)


LONG = [
    ("chat/completions", {"messages": [{"role": "user", "content": "word " * 60}]}, "at least 61"),
    ("chat/completions", {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 5}, "at least 61"),
    ("completions", {"prompt": "a b", "max_tokens": 1000}, "max_tokens=1000"),
    ("completions", {"prompt": [5] * 70, "max_tokens": 4}, "74 tokens"),
    ("responses", {"input": "word " * 90}, "input tokens"),
    ("messages", {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 1000}, "at least 61"),
]


@pytest.mark.parametrize(("path", "asked", "number"), LONG)
async def test_a_call_that_does_not_fit_is_told_why_and_noted(house, path, asked, number):
    """Both numbers are vLLM's; the cure is ours; the attempt keeps that it happened, and it is no infrastructure's failure."""
    house.fake.max_model_len = 60
    http = await house.http()
    answer = await http.post(f"/{path}", json={"model": "policy", **asked})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert number in error["message"]
    assert "60" in error["message"]
    assert "policy_server.max_model_len" in error["message"]
    if path != "messages":
        assert error["code"] == "context_length_exceeded"
    (step,) = await house.transitions()
    assert (step.status, step.finish_reason, len(step.response_ids)) == (CallStatus.REFUSED, TOO_LONG, 0)
    assert number in step.error
    outcome = judge(Outcome(error="the prompt was refused", fault=Fault.AGENT), [step])
    assert outcome.fault is Fault.AGENT


@pytest.mark.parametrize(
    ("path", "asked", "limit"),
    [
        ("chat/completions", {"messages": HI, "max_tokens": 60}, 60),
        ("chat/completions", {"messages": HI, "max_tokens": 60, "stream": True}, 60),
        ("chat/completions", {"messages": HI, "max_tokens": 7, "max_completion_tokens": 1000}, 1000),
        ("responses", {"input": "hi", "max_output_tokens": 4096}, 4096),
        ("messages", {"messages": HI, "max_tokens": 128_000, "stream": True}, 128_000),
    ],
)
async def test_a_limit_for_which_there_is_no_room_is_taken_out_and_noted(house, path, asked, limit):
    """Clients have defaults for models with more context, as ChatAnthropic has."""
    house.fake.max_model_len = 60
    http = await house.http()
    answer = await http.post(f"/{path}", json={"model": "gpt-9", **asked})
    assert answer.status_code == 200
    assert [bool(each.body.keys() & {"max_tokens", "max_completion_tokens"}) for each in house.fake.requests] == [
        True,
        False,
    ]
    (step,) = await house.recorded()
    assert (step.status, step.max_tokens_asked, step.requested_model) == (CallStatus.OK, limit, "gpt-9")
    await http.post(
        f"/{path}",
        json={"model": "gpt-9", **asked}
        | dict.fromkeys(asked.keys() & {"max_tokens", "max_completion_tokens", "max_output_tokens"}, 5),
    )
    assert (await house.recorded(2))[1].max_tokens_asked == 0


async def test_what_a_client_raises_for_a_call_that_does_not_fit_has_the_cure(house):
    """It is looked for in the errors of failed rollouts."""
    house.fake.max_model_len = 60
    client = await house.client()
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "word " * 60}], max_tokens=60
        )
    assert raised.value.code == "context_length_exceeded"
    assert CURE_OF_LENGTH in str(raised.value)


async def test_a_vllm_without_a_parser_of_tool_calls_is_told_in_words_of_settings(house):
    """A model whose chat template has no place for tools gets no parser."""
    house.fake.queue(
        Reply(
            status=400,
            message='"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        )
    )
    http = await house.http()
    answer = await http.post("/chat/completions", json={"messages": HI})
    assert answer.json()["error"]["message"] == CURE_OF_TOOLS
    (step,) = await house.transitions()
    assert (step.status, step.error) == (CallStatus.REFUSED, CURE_OF_TOOLS)


async def test_other_refusals_of_vllm_stay_as_they_are(house):
    house.fake.queue(Reply(status=400, message="no such thing"))
    http = await house.http()
    answer = await http.post("/chat/completions", json={"messages": HI})
    assert answer.json()["error"]["message"] == "no such thing"
    (step,) = await house.transitions()
    assert (step.status, step.error) == (CallStatus.REFUSED, "no such thing")
