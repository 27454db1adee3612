"""What an agent sent and got is in the record of one rollout against a script."""

from __future__ import annotations

import openai
from lightning.testing import RolloutRecord, rollout
from lightning.types import LLM, Task
from lightning_record.exchanges import Exchange, read


def chat(task: Task, llm: LLM) -> float:
    """Two chat calls."""
    messages: list[dict[str, str]] = [{"role": "user", "content": str(task.input)}]
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[arg-type]
        last = client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[arg-type]
    return float("4" in (last.choices[0].message.content or ""))


def exchanges_of(record: RolloutRecord) -> list[Exchange]:
    found = read(record.transitions)
    assert all(found)
    return [each for each in found if each is not None]


def test_each_call_has_its_request_and_its_reply() -> None:
    first, last = exchanges_of(rollout(chat, "2 + 2", ["I add", "it is 4"]))
    assert [first.path, last.path] == ["/chat/completions"] * 2
    assert last.reply["choices"][0]["message"]["content"] == "it is 4"  # type: ignore[index,call-overload]


def test_a_call_of_another_api_has_its_path() -> None:
    async def ask(task: Task, llm: LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            said = await client.responses.create(model=llm.model, input=str(task.input))
        return float(said.output_text == "tea")

    (call,) = exchanges_of(rollout(ask, "tea", ["tea"]))
    assert call.path == "/responses"


def test_a_refused_call_has_its_status() -> None:
    assert exchanges_of(rollout(chat, 1, ["I add"]))[1].status == 400
