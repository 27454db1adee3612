"""The fake policy server refuses what vLLM refuses, and takes what vLLM takes."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.testing.tiny_models import make_tiny_tokenizer
from lightning.testing.vllm_replies import NO_TEXT, refusal

HI = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.5},
    "negative": {"temperature": -0.1},
    "top_p": {"top_p": 0.0},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"frequency_penalty": -3.0},
    "stream options": {"stream_options": {"include_usage": True}},
    "top logprobs": {"top_logprobs": 3},
    "stop": {"stop": [""]},
    "effort": {"reasoning_effort": "enormous"},
    "no tools": {"tools": []},
    "choice without tools": {"tool_choice": "auto"},
    "choice of another": {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
    "choice by a word": {"tools": [ADD], "tool_choice": "any"},
    "kind of tool": {"tools": [{"type": "web_search"}]},
    "format": {"response_format": {"type": "xml"}},
    "no schema": {"response_format": {"type": "json_schema"}},
    "no role": {"messages": [{"content": "hi"}]},
    "a template": {"chat_template": "{{ messages }}"},
    "a template among arguments": {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
}
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "all in range": {
        "temperature": 2.0,
        "top_p": 1.0,
        "presence_penalty": -2.0,
        "stop": "end",
        "reasoning_effort": "none",
    },
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
    "tools": {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": True},
    "arguments of the template": {"chat_template_kwargs": {"enable_thinking": False, "chat_template": None}},
    "none of them": {"tools": [ADD], "tool_choice": "none"},
    "unknown fields": {"service_tier": "auto", "metadata": {"a": "b"}, "store": True},
    "another role": {"messages": [{"role": "developer", "content": "be brief"}, *HI]},
    "a conversation": {
        "messages": [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5"},
        ]
    },
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
}


def body(more: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, **more}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert refusal(body(REFUSED[name])) is not None


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    assert refusal(body(TAKEN[name])) is None


def test_arguments_that_are_no_json_are_taken_and_tool_calls_that_are_no_functions_refused() -> None:
    def said(call: object) -> dict[str, Any]:
        return body({"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]})

    assert refusal(said({**CALL, "function": {"name": "add", "arguments": "{2, 3"}})) is None
    assert refusal(said("add")) is not None
    assert refusal(said({**CALL, "type": "custom"})) is not None


async def test_the_server_answers_400_and_names_the_field() -> None:
    async with FakeVLLM() as fake, httpx.AsyncClient(base_url=fake.url) as client:
        reply = await client.post("/v1/chat/completions", json=body({"tools": []}))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_half_a_character_is_refused_in_vllms_words(path: str) -> None:
    payload = json.dumps({"model": "tiny", "prompt": "\ud83d", "messages": [{"role": "user", "content": "\ud83d"}]})
    async with FakeVLLM() as fake, httpx.AsyncClient(base_url=fake.url) as client:
        reply = await client.post(path, content=payload)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, NO_TEXT)


def test_these_are_the_tokenizers_own_words() -> None:
    with pytest.raises(TypeError) as caught:
        make_tiny_tokenizer().encode_batch(["\ud83d"])
    assert str(caught.value) == NO_TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_text_beside_tool_calls_is_said_and_each_call_has_an_id_of_its_own(stream: bool) -> None:
    calls = [ToolCall("add", '{"a": 1}'), ToolCall("now")]
    asked = {"model": "tiny", "messages": HI, "tools": [ADD]}
    ids = []
    async with FakeVLLM() as fake, openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0) as client:
        for text in ("Let me see. ", None):
            fake.queue(Reply(text, tool_calls=calls) if text else Reply(tool_calls=calls))
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            message = answer.choices[0].message
            assert (message.content or None, answer.choices[0].finish_reason) == (text, "tool_calls")
            assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}', "{}"]
            ids += [call.id for call in message.tool_calls]
    assert len(set(ids)) == 4
    assert all(found.startswith("chatcmpl-tool-") for found in ids)


@pytest.mark.slow
@pytest.mark.parametrize("bodies", [REFUSED, TAKEN], ids=["refused", "taken"])
def test_vllm_says_the_same(bodies: dict[str, dict[str, Any]]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.online_renderer import OnlineRenderer

    def takes(more: dict[str, Any]) -> bool:
        try:
            asked = ChatCompletionRequest.model_validate(body(more))
            asked.to_sampling_params(16, {})
        except (ValueError, VLLMValidationError):
            return False
        templates = (asked.chat_template, asked.chat_template_kwargs)
        return OnlineRenderer.validate_chat_template(Mock(), *templates, trust_request_chat_template=False) is None

    assert {name: takes(more) for name, more in bodies.items()} == dict.fromkeys(bodies, bodies is TAKEN)
