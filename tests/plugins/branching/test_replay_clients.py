"""OpenAI's and Anthropic's own clients get from a replay what they got from the model, streamed or whole, in the four APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from lightning.testing import Reply, ToolCall, rollout
from lightning.types import LLM, Task
from lightning_branching.recorded import recorded_rollout
from lightning_branching.replay import replay_agent
from lightning_record.texts import WholeReply

pytestmark = pytest.mark.framework

USER = [{"role": "user", "content": "How warm is it in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
REPLIES = (
    Reply("It is warm."),
    Reply(
        "Let me see.", tool_calls=[ToolCall("weather", '{"city": "Rome"}'), ToolCall("weather", '{"city": "Ostia"}')]
    ),
    Reply("cut off", finish_reason="length"),
)
seen: list[Any] = []


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
FLAT: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
ANTHROPICS: Any = [{"name": "weather", "input_schema": SCHEMA}]


def chat(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="m", messages=USER, tools=TOOLS).model_dump()  # type: ignore[arg-type]


def chat_stream(client: openai.OpenAI) -> Any:
    stream = client.chat.completions.create(
        model="m",
        messages=USER,  # type: ignore[arg-type]
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    whole = WholeReply()
    for chunk in stream:
        whole.add(chunk.model_dump(exclude_unset=True))
    return whole.whole()


def completion(client: openai.OpenAI) -> Any:
    return client.completions.create(model="m", prompt="Rome is", logprobs=1).model_dump()


def completion_stream(client: openai.OpenAI) -> Any:
    chunks = list(client.completions.create(model="m", prompt="Rome is", stream=True))
    said = [choice for chunk in chunks for choice in chunk.choices]
    ends = [choice.finish_reason for choice in said if choice.finish_reason]
    return {chunk.id for chunk in chunks}, "".join(choice.text for choice in said), ends


def responses(client: openai.OpenAI) -> Any:
    return client.responses.create(model="m", input=USER, tools=FLAT).model_dump()  # type: ignore[arg-type]


def responses_stream(client: openai.OpenAI) -> Any:
    stream = client.responses.create(model="m", input=USER, tools=FLAT, stream=True)  # type: ignore[arg-type]
    events = [event.model_dump(exclude={"sequence_number"}) for event in stream]
    texts = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    return texts, [event for event in events if not event["type"].endswith(".delta")]


def messages(client: anthropic.Anthropic) -> Any:
    return client.messages.create(model="m", max_tokens=64, messages=USER, tools=ANTHROPICS).model_dump()  # type: ignore[arg-type]


def messages_stream(client: anthropic.Anthropic) -> Any:
    with client.messages.stream(model="m", max_tokens=64, messages=USER, tools=ANTHROPICS) as stream:  # type: ignore[arg-type]
        return stream.get_final_message().model_dump()


CALLS: list[Callable[[Any], Any]] = [
    chat,
    chat_stream,
    completion,
    completion_stream,
    responses,
    responses_stream,
    messages,
    messages_stream,
]


@pytest.mark.parametrize("reply", REPLIES, ids=["text", "tools", "cut"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_client_gets_what_it_got(call: Callable[[Any], Any], reply: Reply) -> None:
    def agent(task: Task, llm: LLM) -> float:
        if call in (messages, messages_stream):
            root = llm.base_url.removesuffix("/v1")
            with anthropic.Anthropic(base_url=root, api_key=llm.api_key, max_retries=0) as theirs:
                seen.append(call(theirs))
        else:
            with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
                seen.append(call(client))
        return 1.0

    seen.clear()
    found = rollout(agent, Task("rome"), [reply], adapters=())
    assert found.rollout.error == ""
    recorded = recorded_rollout(found.rollout, found.transitions, found.tool_events)
    result = replay_agent(recorded, agent, adapters=())
    assert result.same, result
    before, now = seen
    assert before == now
