"""What of a Responses or Messages request reaches vLLM, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from lightning.config import GatewayConfig
from lightning.gateway.dialects import IGNORED, Chat
from lightning.gateway.http import RefusalError
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import CallStatus
from lightning_dialects import chat_template
from lightning_dialects.chat_template import ChatTemplate, prompt_of
from lightning_dialects.messages import Messages
from lightning_dialects.responses import Responses

OURS = {"model", "messages", "return_token_ids", "logprobs", "top_logprobs", "max_tokens"}
HI = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
CHAT_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
SAMPLED = {"temperature": 0.5, "top_p": 0.9}
EXTRAS = {"seed": 7, "top_k": 3, "chat_template_kwargs": {"a": [None]}}
IMAGE = {"type": "input_image", "image_url": "data:x", "detail": "low"}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
FORCED = {"type": "function", "function": {"name": "f"}}


def extras(body: dict) -> dict:
    return {name: value for name, value in body.items() if name not in OURS}


def responses(**asked) -> dict:
    """What vLLM is asked for a Responses request."""
    dialect = Responses(GatewayConfig())
    chat, _ = dialect.translate({"input": "hi", **asked}, (), "resp_1")
    return dialect.plan(chat).body


def messages(**asked) -> dict:
    """What vLLM is asked for a Messages request."""
    dialect = Messages(GatewayConfig())
    chat, _ = dialect.translate({"messages": [HI], "max_tokens": 5, **asked}, (), "msg_1")
    return dialect.plan(chat).body


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({**SAMPLED, "max_output_tokens": 7}, {**SAMPLED, "max_completion_tokens": 7}),
        (EXTRAS, EXTRAS),
        ({"metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto", "temperature": None}, {}),
        ({"tools": [FUNCTION]}, {"tools": [CHAT_FUNCTION]}),
        ({"tools": [{**FUNCTION, "strict": True}]}, {"tools": [STRICT]}),
        ({"tools": [{**FUNCTION, "strict": None}]}, {"tools": [CHAT_FUNCTION]}),
        ({"tools": [], "tool_choice": "auto"}, {}),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
            {"tools": [CHAT_FUNCTION], "tool_choice": FORCED},
        ),
        ({"tools": [FUNCTION], "parallel_tool_calls": False}, {"tools": [CHAT_FUNCTION], "parallel_tool_calls": False}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}},
        ),
        ({"truncation": "auto"}, {"truncate_prompt_tokens": -1}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
    ],
)  # fmt: skip
def test_parameters_of_responses(asked, sent):
    assert extras(responses(**asked)) == sent


async def test_a_response_repeats_its_request(house):
    http = await house.http()
    asked = {"metadata": {"a": "b"}, "user": "u", "store": False, "tools": [FUNCTION], "tool_choice": "auto"}
    said = (await http.post("/responses", json={"input": "hi", **asked})).json()
    assert {name: said[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([{**HI, "type": "message"}, {"role": "developer", "content": "d"}], [HI, {"role": "developer", "content": "d"}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, CHAT_IMAGE]}],
        ),
        (
            [{"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
             {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
             {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
             {"role": "assistant", "content": "done"}, {"role": "assistant", "content": "again"}],
            [{"role": "assistant", "reasoning": "hm", "content": "ab",
              "tool_calls": [{"id": "c", "type": "function", "function": {"name": "n__f", "arguments": "{}"}}]},
             {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "o"}]},
             {"role": "assistant", "content": "done"}, {"role": "assistant", "content": "again"}],
        ),
    ],
)  # fmt: skip
def test_items_of_responses(items, said):
    assert responses(input=items)["messages"] == said


def test_an_unfinished_last_item_is_continued():
    last = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert extras(responses(input=[HI, {**last, "status": "incomplete"}])) == goes_on
    assert extras(responses(input=[HI, {**last, "status": "completed"}])) == {}
    assert extras(messages(messages=[HI, {"role": "assistant", "content": "a"}])) == goes_on


async def test_a_truncated_answer_is_incomplete(house):
    house.fake.queue(Reply("one two", finish_reason="length"), Reply("one two", finish_reason="length"))
    http = await house.http()
    said = (await http.post("/responses", json={"input": "hi"})).json()
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert said["output"][0]["status"] == "incomplete"
    said = (await http.post("/messages", json={"messages": [HI], "max_tokens": 5})).json()
    assert said["stop_reason"] == "max_tokens"


async def test_the_answer_says_the_sampling_that_was_used(build):
    house = await build(override_sampling={"temperature": 0.25, "max_tokens": 5})
    http = await house.http()
    said = (await http.post("/responses", json={"input": "hi", "temperature": 1.5, "max_output_tokens": 9})).json()
    assert said["temperature"] == 0.25
    sent = house.fake.requests[0].body
    assert (sent["temperature"], sent["max_tokens"]) == (0.25, 5)
    assert "max_completion_tokens" not in sent


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_the_agent_asked_for_are_given(house, stream):
    house.fake.queue(Reply("four is it", logprobs=[-0.1, -0.2, -0.3, -0.4]))
    client = await house.client()
    asked = {"model": "policy", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 0}
    if stream:
        async with client.responses.stream(**asked) as events:
            deltas = [event.logprobs[0].logprob async for event in events if event.type == "response.output_text.delta"]
            said = await events.get_final_response()
        assert deltas == pytest.approx([-0.1, -0.2, -0.3])
    else:
        said = await client.responses.create(**asked)
    assert [entry.logprob for entry in said.output[0].content[0].logprobs] == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert house.fake.requests[0].body["top_logprobs"] == 0


async def test_namespaces_come_back(house):
    house.fake.queue(Reply(tool_calls=[ToolCall("n__f", "{}", id="c")]))
    http = await house.http()
    tools = [{"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}]
    said = (await http.post("/responses", json={"input": "hi", "tools": tools})).json()
    assert house.fake.requests[0].body["tools"][0]["function"]["name"] == "n__f"
    (call,) = said["output"]
    assert (call["namespace"], call["name"], call["call_id"]) == ("n", "f", "c")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FUNCTION, {"type": "file_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": ""}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"instructions": 3}, "instructions"),
        ({"stream": 1}, "stream"),
        ({"n": 2}, "n"),
        ({"text": 3}, "text"),
        ({"include": 3}, "include"),
    ],
)
def test_what_responses_refuses(asked, param):
    with pytest.raises(RefusalError) as caught:
        responses(**asked)
    assert (caught.value.status, caught.value.param) == (422, param)
    assert repr(param) in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"metadata": {"user_id": "u"}, "service_tier": "auto"}, {}),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "speed": "fast"}, {}),
        ({"tools": [{**TOOL, "allowed_callers": ["direct"]}]}, {"tools": [CHAT_TOOL]}),
        ({"seed": 7, "top_k": 3, "min_p": 0.1}, {"seed": 7, "top_k": 3, "min_p": 0.1}),
        ({"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [{"name": "f", "input_schema": {}}]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tools": [CHAT_TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any"}},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": True},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            {"tools": [CHAT_TOOL], "tool_choice": FORCED, "parallel_tool_calls": True},
        ),
        ({"tool_choice": {"type": "none"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking_token_budget": 1024}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": {"type": "object"}}}},
        ),
    ],
)  # fmt: skip
def test_parameters_of_messages(asked, sent):
    body = messages(**asked)
    assert extras(body) == sent
    assert body["max_tokens"] == 5


def test_blocks_of_messages():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    text = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [text, text, image]}
    turns = [
        {"role": "user", "content": [text]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"é": 1}},
            ],
        },
        {"role": "user", "content": [text, result, image]},
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "d"}]},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, text, text]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"\\u00e9": 1}'}}
    assert messages(system=system, messages=turns)["messages"] == [
        {"role": "system", "content": "tt"},
        {"role": "user", "content": "t"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call], "content": "a"},
        {"role": "tool", "tool_call_id": "c", "content": "t\nt"},
        {"role": "user", "content": [url]},
        {"role": "user", "content": [{"type": "text", "text": "t"}, url]},
        {"role": "system", "content": "s"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
    ]


def said(text: str) -> dict:
    return {"type": "text", "text": text}


SYSTEM, ANSWERED = {"role": "system", "content": "now"}, {"role": "assistant", "content": "x y z"}
HEADER = "x-anthropic-billing-header: 1"
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}]}
CHAT_USED = {"role": "assistant", "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}]}  # fmt: skip
REFERENCES = [{"type": "tool_reference", "tool_name": "a"}, {"type": "tool_reference", "name": "b"}]
CHAT_REFERENCES = [{"type": "tool_reference", "name": "a"}, {"type": "tool_reference", "name": "b"}]


def found(*content: dict) -> dict:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [*content]}]}


def result(content: object) -> dict:
    return {"role": "tool", "tool_call_id": "c", "content": content}


AS_VLLM = {
    "system later": (
        {"system": "be ", "messages": [HI, SYSTEM, ANSWERED, HI]},
        [{"role": "system", "content": "be "}, HI, SYSTEM, ANSWERED, HI],
        [{"role": "system", "content": "be now"}, HI, ANSWERED, HI],
    ),
    "system later alone": (
        {"messages": [HI, {"role": "system", "content": [said("no"), said("w")]}, ANSWERED, HI]},
        [HI, SYSTEM, ANSWERED, HI],
        [SYSTEM, HI, ANSWERED, HI],
    ),
    "system twice, and billing": (
        {
            "system": [said(HEADER), said("a"), said("b")],
            "messages": [HI, {"role": "system", "content": HEADER}, {"role": "system", "content": [said(HEADER), said("c")]},
                         ANSWERED, SYSTEM, HI],
        },
        [{"role": "system", "content": "ab"}, HI, {"role": "system", "content": "c"}, ANSWERED, SYSTEM, HI],
        [{"role": "system", "content": "abcnow"}, HI, ANSWERED, HI],
    ),
    "system first": ({"messages": [SYSTEM, HI]}, [SYSTEM, HI], [SYSTEM, HI]),
    "a whole system prompt that begins so": (
        {"system": f"{HEADER} and more"}, [{"role": "system", "content": f"{HEADER} and more"}, HI],
        [{"role": "system", "content": f"{HEADER} and more"}, HI],
    ),
    "tools that were found": (
        {"messages": [HI, USED, found(said("two"), *REFERENCES)]},
        [HI, CHAT_USED, result("two"), result(CHAT_REFERENCES)],
        [HI, CHAT_USED, result("two"), result(CHAT_REFERENCES)],
    ),
    "a tool that was found": (
        {"messages": [HI, USED, found(REFERENCES[0])]},
        [HI, CHAT_USED, result(""), result(CHAT_REFERENCES[:1])],
        [HI, CHAT_USED, result(""), result(CHAT_REFERENCES[:1])],
    ),
}  # fmt: skip
"""Requests, and the chat messages that `to_chat_completion_request` of vLLM 0.31 makes of them: where the chat template takes
system messages later on, and where it does not (`merge_inline_system`)."""


@pytest.mark.parametrize("name", AS_VLLM)
@pytest.mark.parametrize("system_first", [False, True])
async def test_messages_are_those_of_vllms_own_endpoint(house, name, system_first):
    asked, anywhere, first = AS_VLLM[name]
    house.fake.system_first = system_first
    http = await house.http()
    answer = await http.post("/messages", json={"messages": [HI], "max_tokens": 5, **asked})
    assert answer.status_code == 200, answer.text
    (sent,) = house.fake.requests
    assert sent.body["messages"] == (first if system_first else anywhere)
    assert "continue_final_message" not in sent.body
    (call,) = await house.transitions()
    assert call.status is CallStatus.OK
    counted = (await http.post("/messages/count_tokens", json={"messages": [HI], **asked})).json()
    assert counted["input_tokens"] == counted["context_management"]["original_input_tokens"] == len(call.prompt_ids)


async def test_where_system_messages_may_stand_is_asked_once_and_what_is_joined_is_said(house, caplog):
    house.fake.system_first = True
    http = await house.http()
    asked = {"messages": [HI, SYSTEM, ANSWERED, HI], "max_tokens": 5}
    assert (await http.post("/messages", json={"messages": [HI], "max_tokens": 5})).status_code == 200
    assert not caplog.records
    for _ in range(2):
        assert (await http.post("/messages", json=asked)).status_code == 200
    (record,) = caplog.records
    assert "joined to them, as vLLM does" in record.getMessage()
    refused = await http.post("/chat/completions", json={"messages": [HI, SYSTEM]})
    assert (refused.status_code, "must be at the beginning" in refused.text) == (
        400,
        True,
    )  # that API's words stay in place


async def test_what_is_not_known_of_a_template_is_said_once_and_changes_nothing(house, caplog):
    house.fake.tokenizes = False
    http = await house.http()
    asked = {"messages": [HI, SYSTEM, HI], "max_tokens": 5, "thinking": {"type": "disabled"}}
    for _ in range(2):
        assert (await http.post("/messages", json=asked)).status_code == 200
    assert [sent.body["messages"][1] for sent in house.fake.requests] == [SYSTEM, SYSTEM]
    assert [sent.body["reasoning_effort"] for sent in house.fake.requests] == ["none", "none"]
    assert [record.getMessage().partition(" (")[0].rpartition("template ")[2] for record in caplog.records] == [
        "takes a system message later on",
        "can do without thinking",
    ]


async def test_a_policy_server_that_does_not_say_is_waited_for_once(monkeypatch):
    template, asked = ChatTemplate(), []

    async def tokenize(body):
        asked.append(body)
        await asyncio.sleep(0.05)
        raise TimeoutError

    began = time.monotonic()
    questions = [ask(tokenize) for ask in (template.wants_system_first, template.can_skip_thinking) for _ in range(20)]
    found = await asyncio.gather(*questions)
    assert time.monotonic() - began < 0.5
    assert (found, len(asked)) == ([False] * 20 + [True] * 20, 2)
    assert await template.wants_system_first(tokenize) is False
    assert len(asked) == 2
    monkeypatch.setattr(chat_template, "ASK_AGAIN", 0.0)
    assert await template.wants_system_first(tokenize) is False
    assert len(asked) == 3


async def test_where_no_policy_server_is_up_all_who_ask_wait_for_one_once():
    template, asked = ChatTemplate(), []

    async def tokenize(body):
        asked.append(body)
        await asyncio.sleep(0.05)
        raise RefusalError(503, "no_policy_server", "None is up.")

    for _ in range(2):  # whoever comes later asks again: one may be up by then
        found = await asyncio.gather(
            *(template.wants_system_first(tokenize) for _ in range(20)), return_exceptions=True
        )
        assert {(type(each), each.code) for each in found} == {(RefusalError, "no_policy_server")}
    assert len(asked) == 2


@pytest.mark.parametrize(("skips", "effort"), [(True, "none"), (False, "low")])
async def test_thinking_is_disabled_as_vllms_own_endpoint_does_it(house, skips, effort):
    """A template that ignores the word is asked for little thinking instead."""
    house.fake.skips_thinking = skips
    http = await house.http()
    asked = {"messages": [HI], "max_tokens": 5, "thinking": {"type": "disabled"}}
    assert (await http.post("/messages", json=asked)).status_code == 200
    assert house.fake.requests[0].body["reasoning_effort"] == effort
    (call,) = await house.transitions()
    counted = (await http.post("/messages/count_tokens", json=asked)).json()
    assert counted["input_tokens"] == len(call.prompt_ids)


def test_the_prompt_that_is_counted_is_the_one_that_the_template_makes():
    """Its own template and the documents are part of it."""
    given = {
        "chat_template": "{{ messages }}",
        "documents": [{"text": "d"}],
        "chat_template_kwargs": {"deep": True, "enable_thinking": True, "reasoning_effort": "high"},
        "mm_processor_kwargs": {"a": 1},
    }
    chat = messages(**given, tools=[TOOL], output_config={"effort": "low"})
    prompt = prompt_of(chat)
    kept = ("messages", "tools", "chat_template", "mm_processor_kwargs")
    assert {name: prompt[name] for name in kept} == {name: chat[name] for name in kept}
    ours = {"deep": True, "enable_thinking": True, "reasoning_effort": "low", "documents": [{"text": "d"}]}
    assert prompt["chat_template_kwargs"] == ours
    assert prompt_of({"messages": [HI]}) == {"messages": [HI]}


@pytest.mark.parametrize(
    ("turns", "sent", "continues"),
    [
        ([HI, ANSWERED, {"role": "user", "content": [said("")]}], [HI, ANSWERED, {"role": "user", "content": ""}], False),
        ([HI, ANSWERED, {"role": "user", "content": []}], [HI, ANSWERED, {"role": "user", "content": ""}], False),
        ([HI, ANSWERED, {"role": "user", "content": ""}], [HI, ANSWERED, {"role": "user", "content": ""}], False),
        ([HI, {"role": "assistant", "content": [said("")]}, HI], [HI, {"role": "assistant", "content": ""}, HI], False),
        ([HI, ANSWERED, {"role": "system", "content": HEADER}], [HI, ANSWERED], False),
        ([HI, {"role": "assistant", "content": [said("")]}], [HI, {"role": "assistant", "content": ""}], False),
        ([HI, USED], [HI, CHAT_USED], False),
        ([HI, ANSWERED], [HI, ANSWERED], True),
    ],
)  # fmt: skip
def test_a_turn_that_says_nothing_is_a_turn(turns, sent, continues):
    """What the answer goes on with is what the agent sent last, whatever is left of it."""
    body = messages(messages=turns)
    assert body["messages"] == sent
    assert body.get("continue_final_message", False) is continues


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [HI, USED, found({"type": "tool_reference"})]}, "messages[2].content[0].content[0].tool_name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ({"compaction": {"type": "x"}}, "compaction"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"tools": [{**TOOL, "input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"stream": "yes"}, "stream"),
        ({"thinking": True}, "thinking"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_messages_refuses(asked, param):
    with pytest.raises(RefusalError) as caught:
        messages(**asked)
    assert repr(param) in str(caught.value)
    said = json.loads(Messages(GatewayConfig()).refusal(caught.value))
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "asked", "param", "cure"),
    [
        ("/chat/completions", {"functions": [{"name": "f"}]}, "functions", "Send them as 'tools'."),
        ("/chat/completions", {"function_call": "auto"}, "function_call", "Send 'tool_choice'."),
        ("/chat/completions", {"messages": [HI, {"role": "assistant", "function_call": {"name": "f"}}]},
         "messages[1].function_call", "Send 'tool_calls'."),
        ("/chat/completions", {"web_search_options": {"a": 1}}, "web_search_options", "Give the agent a tool that does it."),
        ("/chat/completions", {"audio": {"voice": "alloy"}}, "audio", "Leave it out."),
        ("/chat/completions", {"guided_json": {"type": "object"}}, "guided_json", "Send 'structured_outputs'."),
        ("/chat/completions", {"guided_choice": ["a", "b"]}, "guided_choice", "Send 'structured_outputs'."),
        ("/completions", {"prompt": "a", "best_of": 3}, "best_of", "Send 'n', and choose in the agent."),
        ("/messages", {"guided_regex": "a", "max_tokens": 5}, "guided_regex", "Send 'structured_outputs'."),
        ("/responses", {"input": "a", "guided_grammar": "a"}, "guided_grammar", "Send 'structured_outputs'."),
    ],
)  # fmt: skip
async def test_what_vllm_would_ignore_though_it_changes_the_answer_is_refused(house, path, asked, param, cure):
    """The agent would get another answer than it asked for, and nobody would say so."""
    http = await house.http()
    answer = await http.post(path, json={"messages": [HI], **asked})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message.startswith(repr(param)), message.endswith(cure)) == (422, True, True), message
    (call,) = await house.transitions()
    assert (call.status, not house.fake.requests) == (CallStatus.REFUSED, True)


async def test_what_vllm_ignores_and_changes_nothing_is_taken(house):
    http = await house.http()
    asked = {
        "functions": [],
        "function_call": None,
        "store": True,
        "prediction": {"type": "content"},
        "verbosity": "low",
    }
    for call in (None, "none"):
        answer = await http.post("/chat/completions", json={"messages": [HI], **asked, "function_call": call})
        assert answer.status_code == 200, answer.text
    assert (await http.post("/completions", json={"prompt": "a", "n": 2, "best_of": 2})).status_code == 200


def test_of_several_such_fields_the_same_one_is_always_named():
    """Whatever order the request, or this process, has them in."""
    body = {"messages": [HI], **dict.fromkeys(reversed(IGNORED), "x")}
    for first in IGNORED:
        with pytest.raises(RefusalError) as caught:
            Chat().plan({**body})
        assert caught.value.param == first
        del body[first]


async def test_a_response_goes_on_without_new_input(house):
    http = await house.http()
    first = (await http.post("/responses", json={"input": "hi"})).json()
    answer = await http.post("/responses", json={"previous_response_id": first["id"]})
    assert answer.status_code == 200, answer.text
    said = first["output"][0]["content"][0]["text"]
    assert house.fake.requests[1].body["messages"] == [HI, {"role": "assistant", "content": said}]
    for asked in ({}, {"previous_response_id": first["id"], "input": ""}):
        assert (await http.post("/responses", json=asked)).json()["error"]["param"] == "input"


async def test_a_websocket_is_refused_with_the_word_to_go_on_without_it(house, caplog):
    """Codex asks for one first, and six times more if it is told anything else."""
    http = await house.http()
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    answer = await http.get("/responses", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "no_websocket")
    assert (answer.headers["upgrade"], "by POST over HTTP" in answer.text) == ("HTTP/1.1", True)
    assert (await http.post("/responses", json={"input": "hi"})).status_code == 200
    assert not caplog.records


CALL = {"type": "tool_use", "id": "c", "name": "f"}
TOWER: list = []
for _ in range(2000):
    TOWER = [TOWER]


@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (responses, {"text": {"format": "json"}}),
        (responses, {"tools": [{"type": ["function"]}]}),
        (responses, {"tool_choice": ["auto"], "tools": []}),
        (responses, {"input": [{"type": "message", "role": "user", "content": "a", "status": []}]}),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image", "source": "data:x"}]}]}),
        (messages, {"messages": [{"role": "assistant", "content": [{**CALL, "input": TOWER}]}]}),
        (messages, {"tools": [{**TOOL, "type": {}}]}),
        (messages, {"context_management": "none"}),
        (messages, {"output_config": {"format": "json"}}),
    ],
)  # fmt: skip
def test_what_has_another_type_than_the_api_says_is_the_agents_fault(ask, asked):
    with pytest.raises(RefusalError) as caught:
        ask(**asked)
    assert caught.value.status == 422


async def test_a_malformed_request_is_refused_and_not_retried_or_logged(house, caplog):
    http = await house.http()
    image = {"role": "user", "content": [{"type": "image", "source": "data:x"}]}
    for path in ("messages", "messages/count_tokens"):
        answer = await http.post(f"/{path}", json={"messages": [image], "max_tokens": 5})
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request_error")
    answer = await http.post("/responses", json={"input": "hi", "text": {"format": "json"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
    assert not caplog.records
    refused = await house.transitions()  # counting tokens is no call
    assert [(step.status, step.finish_reason) for step in refused] == [
        (CallStatus.REFUSED, "invalid_request"),
        (CallStatus.REFUSED, "invalid_request"),
    ]
