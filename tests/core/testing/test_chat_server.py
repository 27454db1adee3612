"""The chat server's answers have all that strict clients read of a real one's."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from lightning.testing import ChatServer


def test_answers_say_their_usage_in_a_stream_only_where_it_is_asked_for() -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "one two three"}]}
    with ChatServer(answer=lambda call: "four\nfive") as server:
        llm = server.llm()
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            plain = client.chat.completions.create(**asked)  # type: ignore[call-overload]
            with_usage = list(
                client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
            )
            without = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    counts = (plain.usage.prompt_tokens, plain.usage.completion_tokens, plain.usage.total_tokens)
    assert counts == (3, 2, 5)
    assert with_usage[-1].usage == plain.usage
    assert [chunk.usage for chunk in without] == [None] * len(without)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_usage[:-1]) == "four\nfive"


@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_of_a_policy_are_answered_in_their_own_shapes(stream: bool) -> None:
    with ChatServer() as server:
        llm = server.llm()
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
            if stream:
                with client.responses.stream(model="policy", input="hi") as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(model="policy", input="hi")
        base = llm.base_url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=base, api_key=llm.api_key, max_retries=0) as claude:
            asked: dict[str, Any] = {
                "model": "policy",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "ho"}],
            }
            if stream:
                with claude.messages.stream(**asked) as pieces:
                    message = pieces.get_final_message()
            else:
                message = claude.messages.create(**asked)
    assert (response.output_text, response.status) == ("you said hi", "completed")
    assert [block.text for block in message.content] == ["you said ho"]  # type: ignore[union-attr]
    assert [call.path for call in server.calls] == ["/v1/responses", "/v1/messages"]
