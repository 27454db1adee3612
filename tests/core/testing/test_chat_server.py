"""The chat server's answers have all that strict clients read of a real one's."""

from __future__ import annotations

import openai
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
